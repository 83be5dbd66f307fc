"""What each part of repair brings: models on the same clips, with what repair knows of a language taken away in turn.

    python benchmarks/repair.py MODEL... --data MANIFEST... [--limit N] [--note TEXT] [--out FILE.json]

On a CPU, in int8 where the model is stored so. Prints a table, then one JSON line.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whisfusion import checkpoint, hub
from whisfusion.checkpoint import Model
from whisfusion.data.manifest import read_manifest
from whisfusion.data.table import text_table
from whisfusion.data.utterance import Utterance
from whisfusion.environment import machine, versions
from whisfusion.evaluate.rates import Rate
from whisfusion.evaluate.run import evaluate
from whisfusion.evaluate.score import read_hypotheses, score
from whisfusion.systems import DiffusionSystem, Int8System
from whisfusion.train.dev import spread
from whisfusion.transcriber import Transcriber

WITHOUT = {
    "words and trigrams": {"lexicon": None, "grammar": None},
    "trigrams": {"grammar": None},
    "words": {"lexicon": None},
    "nothing": {},
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names or folders")
    parser.add_argument("--data", nargs="+", required=True, help="manifests, each a set")
    parser.add_argument("--limit", type=int, default=10_000, help="clips of each set, spread over it")
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def forms(name: str) -> Iterator[tuple[str, Transcriber]]:
    """The model with less and less taken away of what repair knows."""
    for without, parts in WITHOUT.items():
        model: Model = checkpoint.load(hub.resolve(name), dtype=torch.float32)
        system = Int8System if model.stored_int8 else DiffusionSystem
        yield without, Transcriber(system(replace(model, **parts)))


def percent(rate: Rate | None) -> float | None:
    return None if rate is None else round(100 * rate.rate, 2)


def measure(name: str, utterances: Sequence[Utterance]) -> list[dict[str, Any]]:
    """A row for each set: as drawn, and repaired without this and that."""
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for without, transcriber in forms(name):
            out = Path(folder) / f"{without}.jsonl"
            evaluate(transcriber, utterances, out)
            for part in score(read_hypotheses(out), utterances).scores:
                about = {"model": Path(name).name, "set": part.dataset, "measure": part.measure}
                row = rows.setdefault(part.dataset, about | {"clips": part.selected.utterances})
                row["drawn"] = percent(part.drawn)
                row[f"without {without}"] = percent(part.selected)
    return list(rows.values())


def run(args: argparse.Namespace) -> dict[str, Any]:
    utterances = [u for path in args.data for u in spread(read_manifest(path), args.limit)]
    rows = [row for name in args.models for row in measure(name, utterances)]
    # The command names files, not where they lie on this machine.
    names = [Path(name).name for name in (*args.models, "--data", *args.data)]
    return {
        "benchmark": "repair",
        "command": " ".join(["python benchmarks/repair.py", *names, "--limit", str(args.limit)]),
        "note": args.note,
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
        "seed": 0,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    result = run(args)
    names = list(result["rows"][0])
    print(text_table(names, [[str(row[name]) for name in names] for row in result["rows"]]), file=sys.stderr)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
