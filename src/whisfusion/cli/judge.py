"""whisfusion evaluate and whisfusion score: decoding and judging, apart."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisfusion.cli.decoding import add_decoding_options, add_model_options, decoding_arguments, load_transcriber
from whisfusion.cli.parser import Arguments, Commands, Parser, checked
from whisfusion.cli.progress import AudioProgress
from whisfusion.errors import ManifestError

if TYPE_CHECKING:
    from whisfusion.data.manifest import Utterance
    from whisfusion.transcriber import Transcriber

_EVALUATE_EXAMPLES = """\
examples:
  whisfusion evaluate base --data test/librispeech.jsonl --out hyps.jsonl
  whisfusion score hyps.jsonl --data test/librispeech.jsonl
"""


def add_evaluate(commands: Commands) -> None:
    """Describe `whisfusion evaluate`."""
    parser = commands.add(
        "evaluate",
        "transcribe manifests into raw hypotheses, for score",
        run_evaluate,
        description="Transcribe manifests into raw hypotheses (JSON Lines): every candidate, confidence and timing.",
        usage="whisfusion evaluate MODEL --data MANIFEST... --out FILE.jsonl [options]",
        epilog=_EVALUATE_EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a name that `whisfusion models` lists, or a model folder")
    _add_data(parser)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="where the hypotheses go; how they were made goes to FILE.run.json beside it",
    )
    parser.add_argument(
        "--limit", type=checked(int, lambda n: n >= 1, "at least 1"), metavar="N", help="only the first N"
    )
    parser.add_argument("--detect_language", action="store_true", help="do not tell the model the manifest's language")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        dest="existing",
        action="store_const",
        const="resume",
        default="refuse",
        help="go on with a run that was cut off; failures are tried again",
    )
    existing.add_argument(
        "--overwrite", dest="existing", action="store_const", const="overwrite", help="begin it again"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_model_options(parser)
    add_decoding_options(parser)


def run_evaluate(arguments: Arguments) -> int:
    """Decode, write, and tell what was done; 1 where an utterance could not be decoded."""
    decoding = decoding_arguments(arguments)
    utterances = _read(arguments)[: arguments.limit]
    if not utterances:
        raise ManifestError("the manifests hold no utterances")
    transcriber = load_transcriber(arguments)

    from whisfusion.evaluate.run import RunOptions, evaluate
    from whisfusion.loading import resolve_device

    options = RunOptions(
        decoding=decoding,
        detect_language=arguments.detect_language,
        existing=arguments.existing,
        facts={
            "model": _model_facts(arguments, transcriber),
            "data": [Path(path).name for path in arguments.data],
        },
    )
    total = sum(utterance.duration for utterance in utterances)
    with AudioProgress(total, shown=not arguments.quiet) as progress:
        summary = evaluate(
            transcriber,
            utterances,
            arguments.out,
            options,
            device=str(resolve_device(arguments.device)),
            on_progress=progress.reach,
        )
    speed = summary.audio_seconds / max(1e-9, summary.wall_seconds)
    print(
        f"{summary.utterances:,} utterances in {arguments.out} ({summary.resumed:,} were there already, "
        f"{summary.errors:,} not decoded): {summary.audio_seconds:,.0f} s of audio in {summary.wall_seconds:,.1f} s, "
        f"{speed:.1f}x real time"
    )
    return 1 if summary.errors else 0


def add_score(commands: Commands) -> None:
    """Describe `whisfusion score`."""
    parser = commands.add(
        "score",
        "error rates of hypotheses that evaluate wrote",
        run_score,
        description="Word or character error rates of hypotheses that `whisfusion evaluate` wrote: a table, then one "
        "line of JSON.",
        usage="whisfusion score HYPS.jsonl... --data MANIFEST... [options]",
    )
    parser.add_argument("hypotheses", nargs="+", metavar="HYPS.jsonl", help="files of hypotheses")
    _add_data(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON here too, indented")
    parser.add_argument(
        "--missing",
        choices=("error", "empty", "skip"),
        default="error",
        help="utterances without a hypothesis: refuse (default), count as empty text, or leave out",
    )
    parser.add_argument(
        "--fold_chinese",
        action="store_true",
        help="compare Chinese in simplified characters, whichever were written (needs whisfusion[chinese])",
    )
    parser.add_argument("--resamples", type=int, default=1000, metavar="R", help="of the bootstrap (default 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the bootstrap (default 0)")


def run_score(arguments: Arguments) -> int:
    """Score, print the tables and the JSON line."""
    from whisfusion.evaluate.score import ScoreOptions, read_hypotheses, score
    from whisfusion.evaluate.tables import render_report

    options = ScoreOptions(arguments.missing, arguments.resamples, arguments.seed, arguments.fold_chinese)
    report = score(read_hypotheses(*arguments.hypotheses), _read(arguments), options)
    if not report.scores:
        raise ManifestError("no hypothesis belongs to an utterance of these manifests")
    result: dict[str, Any] = {
        "hypotheses": [Path(path).name for path in arguments.hypotheses],
        "data": [Path(path).name for path in arguments.data],
        **report.to_dict(),
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(render_report(report))
    print()
    print(json.dumps(result, ensure_ascii=False))
    return 0


def _add_data(parser: Parser) -> None:
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="MANIFEST",
        help="JSON Lines (.xz, .gz too), WebDataset tars, or folders of them",
    )


def _read(arguments: Arguments) -> "list[Utterance]":
    from whisfusion.data.manifest import read_manifest

    return read_manifest(*arguments.data)


def _model_facts(arguments: Arguments, transcriber: "Transcriber") -> dict[str, Any]:
    """What was loaded, by hash: a name alone says little."""
    from whisfusion import checkpoint, hub
    from whisfusion.whisper_system import WhisperSystem

    system = transcriber.system
    if isinstance(system, WhisperSystem):
        files = {"weights": system.whisper.sha256}
    else:
        files = checkpoint.read_config(hub.resolve(arguments.model))[1]
    return {
        "name": Path(arguments.model).name,
        "system": arguments.system,
        "dtype": arguments.dtype,
        "sha256": files,
    }
