"""Error rates of a model on test sets, scored from raw hypotheses, which are kept beside the result.

    whisfusion evaluate MODEL --data SET.jsonl --out SET.jsonl                                       for every set
    whisfusion evaluate MODEL --data SETS --detect_language -k 1 -n 1 --out detected.jsonl           for all at once
    python benchmarks/model_scores.py SET.jsonl... --detected detected.jsonl --data SETS --out benchmarks/results/NAME
    python benchmarks/model_scores.py --data SETS --out benchmarks/results/NAME                      what is kept, again

On normalised text, as written, by duration; Chinese also in simplified characters on both sides (whisfusion[chinese]);
how often the language is detected right. runs/scores.sh does it all. Writes scores.json and hypotheses/*.jsonl.xz (ids
and what was heard, no references); prints a table, then one JSON line.
"""

import argparse
import json
import lzma
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from whisfusion.data.manifest import read_manifest
from whisfusion.evaluate.rates import Rate
from whisfusion.evaluate.run import facts_path
from whisfusion.evaluate.score import Detection, Score, ScoreOptions, read_hypotheses, score
from whisfusion.evaluate.written import Punctuation, Written

DETECTED = "detected.jsonl.xz"
COMMAND = "runs/scores.sh base SETS WORK benchmarks/results/base"
"""What makes the bundled model's."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hypotheses", type=Path, nargs="*", help="none: those that are kept in --out are scored again")
    parser.add_argument("--detected", type=Path, help="hypotheses of a run that detected the language")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--command", default=COMMAND, help="what to say that made it")
    return parser.parse_args(argv)


def percents(value: Rate | Punctuation, *names: str) -> dict[str, float]:
    return {"percent" if name == "rate" else name: round(100 * getattr(value, name), 2) for name in names}


def error(rate: Rate) -> dict[str, float]:
    return percents(rate, "rate", "low", "high")


def written_row(written: Written) -> dict[str, Any]:
    def row(marks: Punctuation) -> dict[str, Any]:
        return percents(marks, "precision", "recall", "f1") | {"reference": marks.reference}

    return {
        "punctuated": error(written.punctuated),
        "cased": error(written.cased),
        "punctuation": row(written.punctuation),
        "marks": {mark: row(of) for mark, of in written.marks.items()},
    }


def set_row(part: Score, folded: Score | None, detected: Detection | None) -> dict[str, Any]:
    return {
        "dataset": part.dataset,
        "language": part.language,
        "measure": part.measure,
        **error(part.selected),
        "drawn": part.drawn and error(part.drawn),
        "oracle": None if part.oracle is None else round(100 * part.oracle, 2),
        "utterances": part.selected.utterances,
        "folded": folded
        and {
            "by": f"OpenCC {version('opencc')} t2s",
            **error(folded.selected),
            "drawn": folded.drawn and error(folded.drawn),
        },
        "written": part.written and written_row(part.written),
        "detected": detected and asdict(detected),
        "bins": [
            {"seconds": [group.start, group.end], **error(group.selected), "utterances": group.selected.utterances}
            for group in part.bins
        ],
    }


def how_it_was_made(hypotheses: Path) -> dict[str, Any]:
    facts = json.loads(facts_path(hypotheses).read_text("utf-8"))
    settings = facts["settings"]
    return {
        "decoding": settings["model_defaults"] | settings["decoding"],
        "model_sha256": settings["model"]["sha256"],
        "machine": facts["machine"],
        "versions": facts["versions"],
        "seed": settings["decoding"]["seed"],
    }


def keep(args: argparse.Namespace) -> dict[str, Any]:
    """Put what was given among the kept hypotheses, and tell how those were made."""
    kept = args.out / "hypotheses"
    if args.hypotheses:
        how = how_it_was_made(args.hypotheses[0])
    else:
        before = json.loads((args.out / "scores.json").read_text("utf-8"))
        how = {name: before[name] for name in ("note", "decoding", "model_sha256", "machine", "versions", "seed")}
    given = [(f"{file.name}.xz", file) for file in args.hypotheses]
    if args.detected:
        given.append((DETECTED, args.detected))
    for _, file in given:
        if how_it_was_made(file)["model_sha256"] != how["model_sha256"]:
            raise SystemExit(f"{file} was made by another model than the rest")
    if args.hypotheses:
        for old in kept.glob("*.jsonl.xz"):
            old.unlink()
    kept.mkdir(parents=True, exist_ok=True)
    for name, file in given:
        (kept / name).write_bytes(lzma.compress(file.read_bytes(), preset=9))
    return how


def rows(kept: Path, data: list[str]) -> list[dict[str, Any]]:
    utterances = read_manifest(*data)
    hypotheses = read_hypotheses(*(file for file in sorted(kept.glob("*.jsonl.xz")) if file.name != DETECTED))
    chinese = [utterance for utterance in utterances if utterance.language == "zh"]
    folded = {part.dataset: part for part in score(hypotheses, chinese, ScoreOptions(fold_chinese=True)).scores}
    detected = {}
    if (kept / DETECTED).exists():
        report = score(read_hypotheses(kept / DETECTED), utterances)
        detected = {(part.dataset, part.language): part.detected for part in report.scores}
    return [
        set_row(part, folded.get(part.dataset), detected.get((part.dataset, part.language)))
        for part in score(hypotheses, utterances).scores
    ]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    how = keep(args)
    sets = rows(args.out / "hypotheses", args.data)
    note = args.note or how.pop("note", "")
    result = {"benchmark": "model_scores", "note": note, "sets": sets, **how, "command": args.command}
    (args.out / "scores.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")
    for part in sets:
        print(
            f"{part['dataset']:28} {part['measure']} {part['percent']:6.2f} % ({part['low']:.2f} to {part['high']:.2f})"
        )
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
