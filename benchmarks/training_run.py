"""Keep what a training run showed: its curves, and the error rates of its model, scored anew from raw hypotheses.

    python benchmarks/training_run.py RUN HYPOTHESES.jsonl... --data MANIFEST... --out benchmarks/results/NAME

RUN is a run folder (or the config.json and the CSV files of one). Writes result.json, the logs as they are, and
their plots; prints a table, then one JSON line. Weights, hypotheses and references are not kept.
"""

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

from whisfusion.data.manifest import read_manifest
from whisfusion.evaluate.run import facts_path
from whisfusion.evaluate.score import ScoreOptions, read_hypotheses, score
from whisfusion.train.log import read_csv
from whisfusion.train.plots import draw_plots


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("hypotheses", type=Path, nargs="+")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--trained_on", help="the device of the run, where the hypotheses are of another")
    parser.add_argument("--step", type=int, help="the step of the model that was scored, if not the run's last")
    return parser.parse_args(argv)


def without_folders(value: Any) -> Any:
    """Settings with the names of files instead of their places on one machine."""
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _median(log: list[dict[str, float]], column: str) -> float:
    return statistics.median(row[column] for row in log)


def collect(args: argparse.Namespace) -> dict[str, Any]:
    config = without_folders(json.loads((args.run / "config.json").read_text("utf-8")))
    log, dev = read_csv(args.run / "log.csv"), read_csv(args.run / "dev.csv")
    facts = json.loads(facts_path(args.hypotheses[0]).read_text("utf-8"))
    report = score(read_hypotheses(*args.hypotheses), read_manifest(*args.data), ScoreOptions())
    return {
        "benchmark": "training_run",
        "recipe": config["recipe_name"],
        "steps": round(log[-1]["step"]),
        "model_step": args.step or round(log[-1]["step"]),
        "note": args.note,
        "ms_per_step": round(_median(log, "ms_per_step"), 1),
        "peak_share": None if math.isnan(log[-1]["peak_share"]) else round(_median(log, "peak_share"), 3),
        "hours_heard": round(log[-1]["hours"], 1),
        "loss": log[-1]["loss"],
        "dev_wer": [{"step": round(row["step"]), "percent": round(100 * row["wer"], 2)} for row in dev],
        "test": [
            {
                "dataset": part.dataset,
                "measure": part.measure,
                "percent": round(100 * part.selected.rate, 2),
                "low": round(100 * part.selected.low, 2),
                "high": round(100 * part.selected.high, 2),
                "oracle": None if part.oracle is None else round(100 * part.oracle, 2),
                "utterances": part.selected.utterances,
            }
            for part in report.scores
        ],
        "decoding": facts["settings"]["decoding"],
        "model_sha256": facts["settings"]["model"]["sha256"],
        "machine": facts["machine"],
        "trained_on": args.trained_on or facts["machine"]["device_name"],
        "versions": facts["versions"],
        "seed": config["recipe"]["seed"],
        "command": f"whisfusion train --recipe {config['recipe_name']} --data TRAIN --dev DEV --out RUN",
        "settings": config["recipe"],
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    result = collect(args)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("log.csv", "dev.csv", "dev_sets.csv"):
        shutil.copyfile(args.run / name, args.out / name)
    draw_plots(args.out)
    (args.out / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")
    for part in result["test"]:
        print(f"{part['dataset']:28} {part['percent']:6.2f} % ({part['low']:.2f} to {part['high']:.2f})")
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
