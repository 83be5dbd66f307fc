"""whisfusion bench: how fast a model recognises on this machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisfusion.cli.parser import Arguments, Commands, checked

if TYPE_CHECKING:
    import torch

    from whisfusion.evaluate.speed import Subject

_EPILOG = """\
The paper's protocol: as many short clips as long ones, six bins of five seconds, 14.7 s on average; the timer covers
encoder, decoding, selection, reranking and proofreading. Without --data the clips are made up; without --model
weights are random.

examples:
  whisfusion bench --model base --data test/*.jsonl
  whisfusion bench --shape paper --batch_sizes 1 32 -k 5 15
"""


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add(
        "bench",
        "measure how fast a model recognises here",
        run,
        description="Measure how fast a model recognises on this machine: a table, then one line of JSON.",
        usage="whisfusion bench [--model NAME | --shape SHAPE] [--data MANIFEST...] [options]",
        epilog=_EPILOG,
    )
    positive = checked(int, lambda n: n >= 1, "at least 1")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="NAME", help="a name that `whisfusion models` lists, or a model folder")
    what.add_argument(
        "--shape",
        choices=("paper", "trial", "tiny"),
        default="paper",
        help="random weights of this shape (default paper: 828 M parameters over Whisper-large-v3's encoder)",
    )
    parser.add_argument("--data", nargs="+", default=[], metavar="MANIFEST", help="where clips are taken from")
    parser.add_argument("--per_bin", type=positive, default=56, metavar="N", help="clips in each bin (default 56)")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=("eager", "graph"),
        metavar="E",
        help="eager, graph (default: all that run here)",
    )
    parser.add_argument("--batch_sizes", nargs="+", type=positive, default=[1], metavar="B", help="default 1")
    parser.add_argument("-k", "--candidates", nargs="+", type=positive, default=[5], metavar="K", help="default 5")
    parser.add_argument("-n", "--steps", type=positive, default=3, metavar="N", help="denoising steps (default 3)")
    parser.add_argument("--rerank", action="store_true", help="choose by Whisper's likelihood, not by agreement")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the JSON here too, indented")


def run(arguments: Arguments) -> int:
    """Measure every combination, print the table and the JSON line."""
    from whisfusion.data.table import text_table
    from whisfusion.environment import machine, versions
    from whisfusion.errors import OptionError
    from whisfusion.evaluate import speed_set
    from whisfusion.evaluate.speed import EngineKind, Stage
    from whisfusion.loading import resolve_device, resolve_dtype
    from whisfusion.pdd import PDDOptions

    device = resolve_device(arguments.device)
    engines: list[EngineKind] = arguments.engines or (["eager", "graph"] if device.type == "cuda" else ["eager"])
    if "graph" in engines and device.type != "cuda":
        raise OptionError("the graph engine needs a CUDA device: use --engines eager")
    options = [PDDOptions(candidates=k, steps=arguments.steps) for k in arguments.candidates]
    subject = _subject(arguments, device, resolve_dtype(arguments.dtype, device))
    if arguments.data:
        from whisfusion.data.manifest import read_manifest

        clips = speed_set.load(speed_set.choose(read_manifest(*arguments.data), per_bin=arguments.per_bin))
    else:
        clips = speed_set.made_up(per_bin=arguments.per_bin)

    rows, with_mel = [], []
    for engine in engines:
        stage = Stage(subject, engine, clips)
        for batch in arguments.batch_sizes:
            for pdd in options:
                outside, inside = stage.measure(batch=batch, pdd=pdd, rerank=arguments.rerank)
                rows.append(outside)
                with_mel.append(inside)
    result: dict[str, Any] = {
        "benchmark": "rtfx",
        "clips": len(clips),
        "mean_seconds": round(sum(clip.seconds for clip in clips) / len(clips), 2),
        "set": ", ".join(Path(path).name for path in arguments.data) or "made up",
        "rows": [row.to_dict() for row in rows],
        "rows_with_mel": [row.to_dict() for row in with_mel],
        "machine": machine(str(device)),
        "versions": versions(),
        "seed": 0,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    table = [
        (row.engine, str(row.batch), str(row.k), f"{row.ms:.1f}", f"{row.rtfx:,.0f}", f"{inside.ms:.1f}")
        for row, inside in zip(rows, with_mel, strict=True)
    ]
    print(f"{subject.name}, {result['clips']} clips of {result['mean_seconds']} s on average ({result['set']})\n")
    print(text_table(("engine", "batch", "K", "ms an utterance", "RTFx", "ms with spectrogram"), table))
    print()
    print(json.dumps(result))
    return 0


def _subject(arguments: Arguments, device: "torch.device", dtype: "torch.dtype") -> "Subject":
    from whisfusion.evaluate.speed import Subject, random_subject

    if arguments.model is None:
        return random_subject(arguments.shape, device, dtype)
    from whisfusion import checkpoint, hub
    from whisfusion.weights import load_whisper

    model = checkpoint.load(hub.resolve(arguments.model), device=device, dtype=dtype)
    whisper = model.whisper
    if arguments.rerank and whisper is None:
        whisper = load_whisper(model.config.encoder_name, device, dtype).decoder
    return Subject(Path(arguments.model).name, model, whisper, random=False)
