"""What each part is worth: runs of equal length, each but for one thing the recipe `trial`.

    python runs/ablations.py SPEECH OUT [ROW...] [--steps 3000] [--learning_rate 3e-4 ...]
    python benchmarks/ablations.py OUT --data SPEECH/dev/{librispeech,commonvoice}-en.jsonl --out FILE.json

All rows hear the same speech in the same order unless that is the thing, and are decoded on the dev sets in 1, 2 and 3
steps. SPEECH holds train/ and dev/, and for some rows pseudo/ or synthetic/, as in runs/base.sh; ROW is NAME or
NAME:SEED. One process makes all of them, so that manifests are read, clips decoded and blocks compiled once. A row is
decoded before the next begins; what is done already is skipped, and a run that was stopped is resumed. All other
options are fields of the recipe, for every row: to try this out on a CPU.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from whisfusion.cli import main as whisfusion
from whisfusion.cli.train import pairs
from whisfusion.errors import OptionError, WhisfusionError

# The processes that decode clips import this file too, and should not have to load torch.
if TYPE_CHECKING:
    from whisfusion.train.prepare import Job, TrainArgs

DATA = ("librispeech-en", "commonvoice-en", "ljspeech-en")
DEV = ("librispeech-en", "commonvoice-en")
SEED = 42
STEPS = (1, 2, 3)
"""N: steps of decoding."""


@dataclass(frozen=True)
class Row:
    """What a row has that the recipe `trial` has not."""

    settings: Mapping[str, str] = field(default_factory=dict)
    recipe: str = "trial"
    share: float = 1.0
    """Its length: this share of the steps."""
    also: str | None = None
    """A folder of SPEECH that is heard too."""


_ADAPTER = {"decoder.adapter": "4", "decoder.stride": "2", "ctc_weight": "1"}
# A bank of spectrograms has windows of the clips alone: who compares windows reads audio while training.
_READ = {"feeder": "stream", "graphs": "false"}

ROWS = {
    "trial": Row(),
    "no_anchors": Row({"decoder.anchors": "false"}),
    "uniform": Row({"masks": "[[0,0,1]]"}),  # high mask ratios at no time
    "adapter": Row(_ADAPTER),
    "adapter_no_ctc": Row(_ADAPTER | {"ctc_weight": "0"}),
    "adapter_told": Row(_ADAPTER | {"decoder.spells_every": "2"}),
    "paper_blocks": Row(recipe="trial_paper"),
    "scratch_embeddings": Row({"start": "random"}, recipe="trial_paper"),
    "drafts": Row({"decoder.drafts": "true"}),
    "padded": Row(_READ | {"window": "padded"}, share=0.5),
    "clip": Row(_READ, share=0.5),
    "pseudo": Row(also="pseudo"),
    "synthetic": Row(also="synthetic"),
}
TWICE = ("trial", "no_anchors", "uniform")
"""Rows of two seeds: where the question is the paper's, or the answer has to be sure."""
ALL = [
    *(f"{name}:{seed}" for name in TWICE for seed in (SEED, SEED + 1)),
    *(name for name in ROWS if name not in TWICE),
]


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, str]]:
    """The options, and the fields of the recipe among them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("speech", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all if none is given")
    parser.add_argument("--steps", type=int, default=3000, help="of a whole row (default 3,000)")
    parser.add_argument("--limit", help="decode only the first so many clips")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int)
    args, more = parser.parse_known_args(argv)
    return args, pairs(more)


def asked(args: argparse.Namespace, settings: Mapping[str, str], text: str) -> "TrainArgs":
    """The run that a row asks for."""
    from whisfusion.train import TrainArgs

    name, _, seed = text.partition(":")
    if name not in ROWS:
        raise OptionError(f"there is no row {name}: choose of {', '.join(ROWS)}")
    row = ROWS[name]
    steps, out = str(round(row.share * args.steps)), args.out / f"{name}-{seed or SEED}"
    fields = {"steps": steps, "eval_every": steps, "save_every": steps, "seed": seed or str(SEED)}
    begun = (out / "config.json").exists()
    data = [args.speech / "train" / f"{dataset}.jsonl" for dataset in DATA]
    return TrainArgs(
        recipe=row.recipe,
        data=tuple(map(str, [*data, args.speech / row.also] if row.also else data)),
        dev=tuple(dev_sets(args)),
        out=out,
        settings={} if begun else fields | dict(settings) | dict(row.settings),
        resume=begun,
        device=args.device,
        workers=args.workers,
    )


def dev_sets(args: argparse.Namespace) -> list[str]:
    """What is decoded."""
    return [str(args.speech / "dev" / f"{dataset}.jsonl") for dataset in DEV]


def decode(run: Path, args: argparse.Namespace) -> None:
    """Write a row's hypotheses: n1.jsonl, n2.jsonl, n3.jsonl."""
    for n in STEPS:
        command = ["evaluate", str(run / "model"), "--data", *dev_sets(args), "--out", str(run / f"n{n}.jsonl")]
        command += ["-k", "5", "-n", str(n), "--temperature", "0.1", "--no_proofread", "--batch_size", "64", "--resume"]
        command += ["--engine", "eager", "--device", args.device, "--quiet"]
        command += ["--limit", args.limit] if args.limit else []
        if code := whisfusion(command):
            raise WhisfusionError(f"{run}: not decoded ({code})")


def main(argv: Sequence[str] | None = None) -> int:
    """Make the rows; 1 where a run was asked to stop, and can be resumed."""
    from whisfusion.loading import resolve_device
    from whisfusion.train.launch import in_turn
    from whisfusion.train.parallel import join_ranks
    from whisfusion.train.prepare import Corpus, prepare_one, report

    args, settings = parse_args(argv)
    corpus, problems = Corpus(), []
    runs: list[Path] = []
    jobs: dict[Path, Job] = {}
    for text in args.rows or ALL:
        request = asked(args, settings, text)
        runs.append(Path(request.out or ""))
        if not (runs[-1] / "model").exists():
            jobs[runs[-1]] = prepare_one(request, corpus, problems)
    report(list(dict.fromkeys(problems)))
    with join_ranks(resolve_device(args.device)) as ranks:
        finished = in_turn(list(jobs.values()), ranks)
        for run in runs:
            if run in jobs and not next(finished):
                return 1
            decode(run, args)
            print(f"{run.name} is done", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WhisfusionError as error:
        sys.exit(f"error: {error}")
