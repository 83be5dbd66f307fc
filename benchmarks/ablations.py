"""What each part is worth on the dev sets: the table of the runs that runs/ablations.py makes.

    python benchmarks/ablations.py RUNS... --data DEV... [--out benchmarks/results/ablations.json]

RUNS holds a run folder for each row, named ROW-SEED, with the hypotheses n1.jsonl, n2.jsonl and n3.jsonl in it; rows
may have been made on different days, each in a RUNS of its own. Rows that are not decoded to the end are left out and
named. DEV are the manifests that were decoded. Prints a table; writes JSON to --out, or prints it as one line. Weights,
hypotheses and references are not kept.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from whisfusion.data.manifest import read_manifest
from whisfusion.data.table import text_table
from whisfusion.evaluate.run import facts_path
from whisfusion.evaluate.score import ScoreOptions, read_hypotheses, score
from whisfusion.train.log import read_csv

STEPS = (1, 2, 3)
"""N: steps of decoding."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data", nargs="+", required=True, help="manifests of the dev sets")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def whole(run: Path) -> bool:
    """Whether a run was decoded to the end, in every number of steps."""
    facts = [facts_path(run / f"n{n}.jsonl") for n in STEPS]
    return all(path.exists() and json.loads(path.read_text("utf-8")).get("summary") for path in facts)


def row_of(run: Path, data: list[str]) -> dict[str, Any]:
    """One run: how long it was, and its error rates by set and N."""
    config = json.loads((run / "config.json").read_text("utf-8"))
    log = read_csv(run / "log.csv")
    name, _, seed = run.name.rpartition("-")
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for n in STEPS:
        hypotheses = read_hypotheses(run / f"n{n}.jsonl")
        for part in score(hypotheses, read_manifest(*data), ScoreOptions()).scores:
            numbers = {"percent": part.selected.rate, "low": part.selected.low, "high": part.selected.high}
            rates.setdefault(part.dataset, {})[str(n)] = {key: round(100 * value, 2) for key, value in numbers.items()}
    return {
        "row": name,
        "seed": int(seed),
        "recipe": config["recipe_name"],
        "steps": round(log[-1]["step"]),
        "hours_heard": round(log[-1]["hours"], 1),
        "loss": log[-1]["loss"],
        "ms_per_step": round(statistics.median(line["ms_per_step"] for line in log), 1),
        "dev": rates,
    }


def table(rows: list[dict[str, Any]]) -> str:
    datasets = list(dict.fromkeys(dataset for row in rows for dataset in row["dev"]))
    header = ("row", "seed", "steps", *(f"{dataset} N = {n}" for dataset in datasets for n in STEPS))
    cells = [
        (
            row["row"],
            str(row["seed"]),
            f"{row['steps']:,}",
            *(
                f"{rate['percent']:.2f} ({rate['low']:.1f}-{rate['high']:.1f})"
                for dataset in datasets
                for rate in row["dev"][dataset].values()
            ),
        )
        for row in rows
    ]
    return text_table(header, cells)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    found = sorted((path.parent for runs in args.runs for path in runs.glob("*/n1.jsonl")), key=lambda run: run.name)
    runs = [run for run in found if whole(run)]
    for run in found:
        if run not in runs:
            print(f"{run.name} is not decoded to the end, and left out", file=sys.stderr)
    if not runs:
        raise SystemExit(f"no row in {' '.join(map(str, args.runs))}: make some with runs/ablations.py")
    if twice := {run.name for run in runs if [other.name for other in runs].count(run.name) > 1}:
        raise SystemExit(f"more than one folder is called {', '.join(sorted(twice))}: leave out all but one")
    rows = [row_of(run, args.data) for run in runs]
    facts = json.loads(facts_path(runs[0] / f"n{STEPS[-1]}.jsonl").read_text("utf-8"))
    result = {
        "benchmark": "ablations",
        "rows": rows,
        "decoding": facts["settings"]["decoding"],
        "machine": facts["machine"],
        "versions": facts["versions"],
        "seed": sorted({row["seed"] for row in rows}),
        "command": "python runs/ablations.py SPEECH OUT",
    }
    print(table(rows))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    else:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
