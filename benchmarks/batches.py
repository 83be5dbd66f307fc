"""Whether a clip's transcript depends on what else is in its batch: the same clips in batches of several sizes.

    python benchmarks/batches.py MODEL --data MANIFEST... [--out benchmarks/results/batches.json]

On a GPU products of other shapes add up in another order, and in bf16 a draw near the border of two tokens may fall to
the other side. The first size is what the others are compared with. Prints a table, and writes JSON to --out or prints
it as one line.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import whisfusion
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.data.table import text_table
from whisfusion.data.utterance import Utterance
from whisfusion.environment import machine, versions
from whisfusion.loading import resolve_device, resolve_dtype
from whisfusion.normalise import edit_distance, units
from whisfusion.transcriber import Transcriber

SIZES = (1, 3, 8, 32)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder")
    parser.add_argument("--data", nargs="+", required=True, help="manifests")
    parser.add_argument("--limit", type=int, help="only the first so many clips")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="windows decoded at once")
    parser.add_argument("--engine", default="graph", choices=("auto", "eager", "graph"))
    parser.add_argument("--no_proofread", action="store_true", help="compare what was drawn")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def error_rate(texts: Sequence[str], utterances: Sequence[Utterance]) -> float:
    """Percent, over all clips together."""
    edits, count = 0, 0
    for text, utterance in zip(texts, utterances, strict=True):
        reference = units(utterance.text, utterance.language)
        edits += edit_distance(units(text, utterance.language), reference)
        count += len(reference)
    return 100 * edits / max(1, count)


def measure(
    transcriber: Transcriber,
    utterances: Sequence[Utterance],
    clips: Sequence[np.ndarray],
    sizes: Sequence[int],
    *,
    proofread: bool | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each size, compared with the first."""
    languages = [utterance.language for utterance in utterances]
    first: list[str] = []
    for size in sizes:
        since = time.perf_counter()
        heard = transcriber.transcribe([*clips], language=languages, batch_size=size, proofread=proofread)
        texts = [transcript.text for transcript in heard]
        first = first or texts
        differ = [u.id for u, text, other in zip(utterances, texts, first, strict=True) if text != other]
        yield {
            "batch": size,
            "differ": len(differ),
            "share": round(len(differ) / len(clips), 5),
            "wer": round(error_rate(texts, utterances), 3),
            "seconds": round(time.perf_counter() - since, 1),
            "clips_that_differ": differ,
        }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = resolve_device(args.device)
    engine = args.engine if device.type == "cuda" else "eager"
    transcriber = whisfusion.load(args.model, device=args.device, dtype=args.dtype, engine=engine)
    utterances = read_manifest(*args.data)[: args.limit]
    clips = [load_samples(utterance) for utterance in utterances]
    default = transcriber.system.default
    result: dict[str, Any] = {
        "benchmark": "batches",
        "model": Path(args.model).name,
        "data": ", ".join(Path(path).name for path in args.data),
        "clips": len(clips),
        "engine": engine,
        "dtype": str(resolve_dtype(args.dtype, device)).removeprefix("torch."),
        "proofread": not args.no_proofread,
        "candidates": default.candidates,
        "steps": default.steps,
        "rows": [],
        "machine": machine(str(device)),
        "versions": versions(),
        "seed": 0,
        "command": "python benchmarks/batches.py " + " ".join(_shown(argv)),
    }
    for row in measure(transcriber, utterances, clips, args.sizes, proofread=False if args.no_proofread else None):
        result["rows"].append(row)
        print(f"batch {row['batch']}: {row['seconds']} s", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not args.out:
        print(json.dumps(result))
    rows = result["rows"]
    cells = [
        (str(r["batch"]), str(r["differ"]), f"{100 * r['share']:.2f} %", f"{r['wer']:.3f}", _apart(r, rows[0]))
        for r in rows
    ]
    print(text_table(("batch", "clips that differ", "share", "WER", "moved"), cells))


def _apart(row: dict[str, Any], first: dict[str, Any]) -> str:
    return f"{row['wer'] - first['wer']:+.3f}"


def _shown(argv: list[str] | None) -> list[str]:
    """The arguments without folders, which are nobody else's."""
    return [Path(word).name if "/" in word else word for word in (sys.argv[1:] if argv is None else argv)]


if __name__ == "__main__":
    main()
