"""Keep what a training run showed: its curves, and the error rates of its model, scored anew from raw hypotheses.

    python benchmarks/training_run.py RUN HYPOTHESES.jsonl... --data MANIFEST... --out benchmarks/results/NAME

RUN is a run folder (or the config.json and the CSV files of one), or a folder of stages, of which the last one's model
was scored. Writes result.json, the logs as they are, and their plots, those of stages in folders of their own; prints a
table, then one JSON line. Weights, hypotheses and references are not kept.
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


def runs_of(folder: Path) -> list[Path]:
    """The folder itself, or those of its stages in order."""
    return [folder] if (folder / "config.json").exists() else sorted(folder.glob("[0-9]-*"))


def described(run: Path) -> dict[str, Any]:
    """What a run says about itself."""
    config = without_folders(json.loads((run / "config.json").read_text("utf-8")))
    log, dev = read_csv(run / "log.csv"), read_csv(run / "dev.csv")
    return {
        "recipe": config["recipe_name"],
        "steps": round(log[-1]["step"]),
        "ms_per_step": round(_median(log, "ms_per_step"), 1),
        "peak_share": None if math.isnan(log[-1]["peak_share"]) else round(_median(log, "peak_share"), 3),
        "hours_heard": round(log[-1]["hours"], 1),
        "loss": log[-1]["loss"],
        "dev_wer": [{"step": round(row["step"]), "percent": round(100 * row["wer"], 2)} for row in dev],
        "seed": config["recipe"]["seed"],
        "settings": config["recipe"],
    }


def collect(args: argparse.Namespace) -> dict[str, Any]:
    *before, last = [described(run) for run in runs_of(args.run)]
    facts = json.loads(facts_path(args.hypotheses[0]).read_text("utf-8"))
    report = score(read_hypotheses(*args.hypotheses), read_manifest(*args.data), ScoreOptions())
    stages = " --then ".join(run["recipe"] for run in [*before, last])
    return {
        "benchmark": "training_run",
        **last,
        "model_step": args.step or last["steps"],
        "note": args.note,
        "before": before,
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
        "command": f"whisfusion train --recipe {stages} --data TRAIN --dev DEV --out RUN",
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    result = collect(args)
    args.out.mkdir(parents=True, exist_ok=True)
    for run in runs_of(args.run):
        out = args.out if run == args.run else args.out / run.name
        out.mkdir(exist_ok=True)
        for name in ("log.csv", "dev.csv", "dev_sets.csv"):
            shutil.copyfile(run / name, out / name)
        draw_plots(out)
    (args.out / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")
    for part in result["test"]:
        print(f"{part['dataset']:28} {part['percent']:6.2f} % ({part['low']:.2f} to {part['high']:.2f})")
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
