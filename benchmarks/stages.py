"""What a second stage does to a model, in 1, 2 and 3 steps: scored from raw hypotheses, kept beside the result.

    python benchmarks/stages.py WORK --data SETS --out benchmarks/results/stages
    python benchmarks/stages.py --data SETS --out benchmarks/results/stages           what is kept, again

WORK/MODEL/nN/*.jsonl are what `whisfusion evaluate --no_proofread` wrote for the model in N steps: runs/base.sh.
Writes result.json and hypotheses/MODEL-nN.jsonl.xz (ids, all candidates and their confidences, no references); prints a
table, then one JSON line.
"""

import argparse
import json
import lzma
import re
from pathlib import Path
from typing import Any

from whisfusion.data.manifest import read_manifest
from whisfusion.data.table import text_table
from whisfusion.data.utterance import Utterance
from whisfusion.evaluate.run import facts_path
from whisfusion.evaluate.score import ScoreOptions, read_hypotheses, score

COMMAND = (
    "runs/base.sh SPEECH TEXT OUT; "
    "python benchmarks/stages.py OUT/hypotheses --data SPEECH/test --out benchmarks/results/stages"
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, nargs="?", help="none: what is kept in --out is scored again")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="", help="how the stages were trained")
    parser.add_argument("--command", default=COMMAND, help="what to say that made it")
    return parser.parse_args(argv)


def keep(work: Path, out: Path) -> dict[str, Any]:
    """Put the hypotheses of every model and number of steps into one file each, and tell how they were made."""
    kept, how = out / "hypotheses", {}
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("*.jsonl.xz"):
        old.unlink()
    for folder in sorted(work.glob("*/n[0-9]*")):
        files = sorted(folder.glob("*.jsonl"))
        facts = json.loads(facts_path(files[0]).read_text("utf-8"))
        name = f"{re.sub('^[0-9]+-', '', folder.parent.name)}-{folder.name}"
        (kept / f"{name}.jsonl.xz").write_bytes(lzma.compress(b"".join(file.read_bytes() for file in files), preset=9))
        decoding = facts["settings"]["model_defaults"] | facts["settings"]["decoding"]
        how[name] = {"decoding": decoding, "model_sha256": facts["settings"]["model"]["sha256"]}
    if not how:
        raise SystemExit(f"there are no hypotheses in {work}")
    return {"runs": how, **{key: facts[key] for key in ("machine", "versions")}, "seed": decoding["seed"]}


def rows_of(file: Path, utterances: list[Utterance]) -> list[dict[str, Any]]:
    model, _, steps = file.name.removesuffix(".jsonl.xz").rpartition("-n")
    scores = score(read_hypotheses(file), utterances, ScoreOptions()).scores
    return [
        {
            "model": model,
            "n": int(steps),
            "dataset": part.dataset,
            "measure": part.measure,
            "percent": round(100 * part.selected.rate, 2),
            "low": round(100 * part.selected.low, 2),
            "high": round(100 * part.selected.high, 2),
            "oracle": None if part.oracle is None else round(100 * part.oracle, 2),
            "utterances": part.selected.utterances,
        }
        for part in scores
    ]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.work is not None:
        how = {"note": args.note, **keep(args.work, args.out), "command": args.command}
    else:
        before = json.loads((args.out / "result.json").read_text("utf-8"))
        how = {key: before[key] for key in ("note", "runs", "machine", "versions", "seed", "command")}
    utterances = read_manifest(*args.data)
    files = sorted((args.out / "hypotheses").glob("*.jsonl.xz"))
    rows = [row for file in files for row in rows_of(file, utterances)]
    result = {"benchmark": "stages", "rows": rows, **how}
    (args.out / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")
    cells = [
        (row["model"], str(row["n"]), row["dataset"], f"{row['percent']:.2f} ({row['low']:.2f} to {row['high']:.2f})")
        for row in rows
    ]
    print(text_table(("model", "N", "set", "error, %"), cells))
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
