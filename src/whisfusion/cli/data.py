"""whisfusion data check, import, holdout, restore, synthesise and nothing: getting speech ready to train on."""

from pathlib import Path

from whisfusion.cli.parser import Arguments, Commands, Parser
from whisfusion.cli.progress import count


def add(commands: Commands) -> None:
    """Describe the commands."""
    parser = commands.add_group(
        "data",
        "check, import, hold out and make speech to train on",
        usage="whisfusion data COMMAND ...",
    )
    commands = parser.add_commands()
    commands.begin_group("Commands")
    _add_check(commands)
    _add_import(commands)
    _add_holdout(commands)
    _add_restore(commands)
    _add_synthesise(commands)
    _add_nothing(commands)


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
    report = check_data(arguments.manifests, against=arguments.against, options=options, progress=count)
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
    report = import_corpus(arguments.source, arguments.out, options, progress=count)
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


def _add_synthesise(commands: Commands) -> None:
    parser = commands.add(
        "synthesise",
        "have sentences spoken by a program",
        run_synthesise,
        description="Have sentences spoken by SVOX Pico (pico2wave), RHVoice (RHVoice-test), Open JTalk (open_jtalk)\n"
        "or eSpeak NG (espeak-ng), with many voices, and write tar shards and a manifest into a folder.",
    )
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="sentences, one a line: text files, .xz too")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the shards and the manifest")
    parser.add_argument("--language", required=True, metavar="L", help="that the sentences are in")
    parser.add_argument(
        "--engine",
        choices=("pico", "espeak", "jtalk", "rhvoice"),
        required=True,
        help="pico: en de es fr it; rhvoice: pl pt es; jtalk: ja; espeak: all but ja, and robotic",
    )
    parser.add_argument("--hours", type=float, metavar="H", help="speech to make")
    parser.add_argument("--sentences", type=int, metavar="N", help="clips to make, instead of --hours")
    parser.add_argument(
        "--held_out_voices",
        type=int,
        default=0,
        metavar="V",
        help="voices kept for a dev set, which is made in FOLDER/heldout (default none)",
    )
    parser.add_argument("--held_out_sentences", type=int, default=200, metavar="N", help="of that set (default 200)")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="MANIFEST", help="evaluation sets: their sentences are left out"
    )
    _add_making(parser)


def run_synthesise(arguments: Arguments) -> int:
    """Synthesise, and tell what was left out."""
    from whisfusion.data.manifest import read_manifest
    from whisfusion.data.sentences import read_sentences
    from whisfusion.data.synthesise import SynthesisOptions, synthesise
    from whisfusion.tokenizer import canonical_language

    options = SynthesisOptions(
        language=canonical_language(arguments.language),
        engine=arguments.engine,
        hours=arguments.hours,
        sentences=arguments.sentences,
        held_out_voices=arguments.held_out_voices,
        held_out_sentences=arguments.held_out_sentences,
        coding=arguments.coding,
        seed=arguments.seed,
        workers=arguments.workers,
    )
    evaluation = read_manifest(*arguments.against) if arguments.against else []
    without = [utterance.text for utterance in evaluation if utterance.language == options.language]
    sentences = read_sentences(arguments.texts)
    print(synthesise(sentences, arguments.out, options, without=without, progress=count).render())
    return 0


def _add_nothing(commands: Commands) -> None:
    parser = commands.add(
        "nothing",
        "make clips of silence, noise and music, in which nothing is said",
        run_nothing,
        description="Make clips of silence, noise and music with an empty text, from which a model learns to write\n"
        "nothing where nothing is said.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the shards and the manifest")
    parser.add_argument("--hours", type=float, metavar="H", default=1.0, help="of it (default 1)")
    parser.add_argument("--language", metavar="L", help="of all clips; default: spread over the eleven of the paper")
    _add_making(parser)


def run_nothing(arguments: Arguments) -> int:
    """Make them."""
    from whisfusion.data.nothing import NothingOptions, make_nothing
    from whisfusion.tokenizer import PAPER_LANGUAGES, canonical_language

    languages = (canonical_language(arguments.language),) if arguments.language else PAPER_LANGUAGES
    options = NothingOptions(
        hours=arguments.hours,
        languages=languages,
        coding=arguments.coding,
        seed=arguments.seed,
        workers=arguments.workers,
    )
    print(make_nothing(arguments.out, options, progress=count).render())
    return 0


def _add_making(parser: Parser) -> None:
    """What all that makes clips has in common."""
    parser.add_argument(
        "--coding", choices=("flac", "wav", "opus"), default="flac", help="of the audio: flac (default), wav or opus"
    )
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="default 42")
    parser.add_argument("--workers", type=int, default=0, metavar="W", help="processes; 0 is one for each core")
