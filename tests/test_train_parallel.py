"""Two processes over gloo, sharded with FSDP2, against one process that knows nothing of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_run import CLIPS, small_args, small_state, tensors_of

from whisfusion.train import main
from whisfusion.train.checkpoints import Checkpoints
from whisfusion.train.log import read_csv
from whisfusion.train.parallel import Ranks

# Two halves of a batch are added up in another order; Adam's first steps magnify that.
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-4
# Dropout is off: it is the one thing that each rank draws for itself.
RANDOM = {
    "language_share": "0.3",
    "noise": "0.5",
    "sampler__speeds": "0.9,1.0,1.1",
    "spec_augment__bands": "1",
    "accumulate": "2",
    "eval_every": "6",
    "dev_clips": "3",
    "dev__candidates": "2",
    "dev__steps": "2",
}
WORKER = f"""
import dataclasses, os, pathlib, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from small_run import CLIPS, small_args
from test_train_parallel import RANDOM
from whisfusion.train import main
from whisfusion.train.trainer import Trainer

train = Trainer.step
def train_then_tell(self, batches):
    train(self, batches)
    if self.step_number == int(os.environ["STOP_AT"]) and self.ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
Trainer.step = train_then_tell

args = small_args(pathlib.Path(os.environ["RUN"]), **RANDOM)
finished = main(dataclasses.replace(args, dev=(str(CLIPS),)))
# In one piece: two processes write to the same place.
print("finished " + str(finished) + "\\n", end="", flush=True)
"""


def two_processes(folder: Path, stop_at: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    worker = folder.parent / "worker.py"
    worker.write_text(WORKER)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RUN": str(folder), "STOP_AT": str(stop_at)}
    done = subprocess.run(
        [*command, str(worker)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """One process to the end; two processes, one of which is told to stop in the middle, then one to the end."""
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("parallel")
    one, two = folder / "one", folder / "two"
    assert main(replace(small_args(one, **RANDOM), dev=(str(CLIPS),)))
    said = two_processes(two, stop_at=3)
    assert main(replace(small_args(two, resume=True)))
    return one, two, said


def test_both_ranks_stop_at_the_same_step(runs):
    _, _, said = runs
    assert said.count("finished False") == 2


def test_two_processes_have_the_losses_of_one(runs):
    one, two, _ = runs
    rows, others = read_csv(one / "log.csv"), read_csv(two / "log.csv")
    assert [row["step"] for row in others] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(rows, others, strict=True):
        for name in ("loss", "quantity", "language", "gradient_norm", "utterances", "hours"):
            assert row[name] == pytest.approx(other[name], abs=LOSS_TOLERANCE, rel=LOSS_TOLERANCE, nan_ok=True), name


def test_a_checkpoint_of_two_processes_loads_into_one(runs):
    """The second half of the run is one process, from what two had saved."""
    one, two, _ = runs
    ranks = Ranks(torch.device("cpu"))
    ends = []
    for folder in (one, two):
        _, state = small_state(folder.parent / "unused", **RANDOM)
        state.load(Checkpoints(folder / "checkpoints", ranks))
        state.feeder.close()
        assert state.trainer.step_number == 6
        ends.append(tensors_of(state))
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=WEIGHT_TOLERANCE), name


def test_dev_clips_are_shared_out_and_gathered(tmp_path):
    folder = tmp_path / "run"
    assert two_processes(folder, stop_at=-1).count("finished True") == 2
    [row] = read_csv(folder / "dev.csv")
    assert (row["step"], row["clips"]) == (6, 3)
    assert (folder / "model" / "config.json").exists()
