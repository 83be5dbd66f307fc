"""Error rates of a model on test sets, scored from raw hypotheses, which are kept beside the result.

    whisfusion evaluate MODEL --data SET.jsonl --out SET.jsonl             for every set
    python benchmarks/model_scores.py SET.jsonl... --data MANIFEST... --out benchmarks/results/NAME

Writes scores.json and hypotheses/SET.jsonl.xz (ids and what was heard, no references); prints a table, then one JSON
line.
"""

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

from whisfusion.data.manifest import read_manifest
from whisfusion.evaluate.run import facts_path
from whisfusion.evaluate.score import Score, ScoreOptions, read_hypotheses, score


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hypotheses", type=Path, nargs="+")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="")
    return parser.parse_args(argv)


def row(part: Score) -> dict[str, Any]:
    return {
        "dataset": part.dataset,
        "language": part.language,
        "measure": part.measure,
        "percent": round(100 * part.selected.rate, 2),
        "low": round(100 * part.selected.low, 2),
        "high": round(100 * part.selected.high, 2),
        "oracle": None if part.oracle is None else round(100 * part.oracle, 2),
        "utterances": part.selected.utterances,
        "bins": [
            {
                "seconds": [group.start, group.end],
                "percent": round(100 * group.selected.rate, 2),
                "low": round(100 * group.selected.low, 2),
                "high": round(100 * group.selected.high, 2),
                "utterances": group.selected.utterances,
            }
            for group in part.bins
        ],
    }


def collect(args: argparse.Namespace) -> dict[str, Any]:
    facts = json.loads(facts_path(args.hypotheses[0]).read_text("utf-8"))
    report = score(read_hypotheses(*args.hypotheses), read_manifest(*args.data), ScoreOptions())
    return {
        "benchmark": "model_scores",
        "note": args.note,
        "sets": [row(part) for part in report.scores],
        "decoding": facts["settings"]["model_defaults"] | facts["settings"]["decoding"],
        "model_sha256": facts["settings"]["model"]["sha256"],
        "machine": facts["machine"],
        "versions": facts["versions"],
        "seed": facts["settings"]["decoding"]["seed"],
        "command": "whisfusion evaluate MODEL --data SET.jsonl --out SET.jsonl; python benchmarks/model_scores.py",
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    result = collect(args)
    kept = args.out / "hypotheses"
    kept.mkdir(parents=True, exist_ok=True)
    for file in args.hypotheses:
        (kept / f"{file.name}.xz").write_bytes(lzma.compress(file.read_bytes(), preset=9))
    (args.out / "scores.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")
    for part in result["sets"]:
        print(
            f"{part['dataset']:28} {part['measure']} {part['percent']:6.2f} % ({part['low']:.2f} to {part['high']:.2f})"
        )
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
