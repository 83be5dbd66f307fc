"""whisfusion data check, import, holdout and restore: getting speech ready to train on."""

import sys
from pathlib import Path

from whisfusion.cli.parser import Arguments, Commands
from whisfusion.cli.progress import on_terminal


def add(commands: Commands) -> None:
    """Describe the commands."""
    parser = commands.add_group(
        "data",
        "check, import and hold out speech to train on",
        usage="whisfusion data COMMAND ...",
    )
    commands = parser.add_commands()
    commands.begin_group("Commands")
    _add_check(commands)
    _add_import(commands)
    _add_holdout(commands)
    _add_restore(commands)


def _add_check(commands: Commands) -> None:
    parser = commands.add(
        "check",
        "look for all that is wrong with manifests and their audio",
        run_check,
        description="Look at manifests and their audio: hours by language and dataset, and all that is wrong.\n"
        "Exit status 1 where something is.",
    )
    parser.add_argument(
        "manifests", nargs="+", metavar="MANIFEST", help="JSON Lines, WebDataset tars, or folders of them"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="MANIFEST",
        help="evaluation sets: sentences or speakers shared with them are wrong",
    )
    parser.add_argument(
        "--decode",
        choices=("none", "sample", "all"),
        default="sample",
        help="which clips to decode: none, a few of each dataset (default), or all",
    )
    parser.add_argument(
        "--allow", nargs="+", default=[], metavar="KIND", help="kinds of finding that do not fail the check"
    )
    parser.add_argument("--workers", type=int, default=0, metavar="W", help="threads; 0 is one for each core")


def run_check(arguments: Arguments) -> int:
    """Print the report."""
    from whisfusion.data.check import CheckOptions, check_data

    options = CheckOptions(decode=arguments.decode, allow=tuple(arguments.allow), workers=arguments.workers)
    report = check_data(arguments.manifests, against=arguments.against, options=options, progress=_count)
    print(report.render())
    return 0 if report.ok else 1


def _add_import(commands: Commands) -> None:
    parser = commands.add(
        "import",
        "make a manifest of a corpus",
        run_import,
        description="Make a manifest of a LibriSpeech or Common Voice folder, a NeMo manifest or WebDataset tars.",
    )
    parser.add_argument("source", metavar="SOURCE", help="the corpus: a folder or a file")
    parser.add_argument("out", metavar="OUT.jsonl", help="the manifest to write")
    parser.add_argument(
        "--layout",
        choices=("librispeech", "commonvoice", "manifest"),
        help="what the source is, where looking at it does not tell",
    )
    parser.add_argument("--language", metavar="L", help="of all that does not say its own")
    parser.add_argument("--dataset", metavar="NAME", help="what to call it; default: the corpus's own name")
    parser.add_argument("--split", default="train", metavar="NAME", help="Common Voice: which table (default train)")
    parser.add_argument(
        "--audio", metavar="DIR", help="where the audio lies that the labels name, as files or tar shards"
    )
    parser.add_argument(
        "--pack", action="store_true", help="write the audio as 16 kHz Opus into tar shards beside OUT.jsonl"
    )
    parser.add_argument("--workers", type=int, default=0, metavar="W", help="threads; 0 is one for each core")


def run_import(arguments: Arguments) -> int:
    """Import, and tell what was left out."""
    from whisfusion.data.importers import ImportOptions, import_corpus

    options = ImportOptions(
        layout=arguments.layout,
        language=arguments.language,
        dataset=arguments.dataset,
        split=arguments.split,
        audio=arguments.audio,
        pack=arguments.pack,
        workers=arguments.workers,
    )
    report = import_corpus(arguments.source, arguments.out, options, progress=_count)
    print(report.render())
    return 0 if report.ok else 1


def _add_holdout(commands: Commands) -> None:
    parser = commands.add(
        "holdout",
        "draw a test set, and a blacklist that keeps it out of training",
        run_holdout,
        description="Draw a test set out of manifests, and write the blacklist that keeps it out of training.",
    )
    parser.add_argument("manifests", nargs="+", metavar="MANIFEST", help="what to draw from")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl", help="the test set's manifest")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="audio files (default 1000)")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="default 42")
    parser.add_argument(
        "--include",
        nargs="+",
        default=["*/*"],
        metavar="LANGUAGE/DATASET",
        help="corpora to draw from, such as 'ja/reazon*'",
    )


def run_holdout(arguments: Arguments) -> int:
    """Draw, and tell where the files are."""
    from whisfusion.data.holdout import HoldoutOptions, hold_out
    from whisfusion.data.manifest import read_manifest

    options = HoldoutOptions(count=arguments.count, seed=arguments.seed, include=tuple(arguments.include))
    print(hold_out(read_manifest(*arguments.manifests), arguments.out, options).render())
    return 0


def _add_restore(commands: Commands) -> None:
    parser = commands.add(
        "restore",
        "give a corpus without case and punctuation sentences",
        run_restore,
        description="Write texts as sentences, with the case and punctuation of a recogniser where its words agree.",
    )
    parser.add_argument("manifests", nargs="+", metavar="MANIFEST", help="what to restore")
    parser.add_argument("--written", nargs="+", required=True, metavar="HYPS.jsonl", help="from whisfusion evaluate")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl", help="the manifest to write")
    parser.add_argument(
        "--least", type=float, default=0.7, metavar="SHARE", help="leave out what agrees in fewer words (default 0.7)"
    )


def run_restore(arguments: Arguments) -> int:
    """Restore, and tell how many were left out."""
    from whisfusion.data.manifest import read_manifest, write_manifest
    from whisfusion.data.restore import restore_manifest
    from whisfusion.evaluate.score import read_hypotheses

    written = read_hypotheses(*arguments.written)
    kept, dropped = restore_manifest(read_manifest(*arguments.manifests), written, least=arguments.least)
    write_manifest(arguments.out, kept)
    print(f"{len(kept):,} utterances in {arguments.out}, {dropped:,} left out")
    return 0


def _count(done: int, total: int) -> None:
    """Say on a terminal how far long work has come, on one line."""
    if on_terminal():
        of = f" of {total:,}" if total else ""
        print(f"\r{done:,}{of}", end="\n" if done == total else "", file=sys.stderr, flush=True)
