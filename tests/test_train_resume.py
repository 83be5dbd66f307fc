import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_run import small_args, small_state, tensors_of

from whisfusion import checkpoint
from whisfusion.errors import ModelError, OptionError
from whisfusion.train import main
from whisfusion.train.checkpoints import Checkpoints
from whisfusion.train.log import read_csv
from whisfusion.train.parallel import Ranks
from whisfusion.train.trainer import Trainer

# Everything that is random is on.
RANDOM = {
    "decoder__dropout": "0.2",
    "language_share": "0.3",
    "noise": "0.5",
    "sampler__speeds": "0.9,1.0,1.1",
    "sampler__join": "0.3",
    "spec_augment__bands": "1",
    "spec_augment__spans": "1",
}
RANKS = Ranks(torch.device("cpu"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a stop."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(small_args(folder, **RANDOM))
    return folder


def final(folder: Path, settings: dict[str, str]) -> tuple[dict[str, torch.Tensor], dict, str]:
    """All tensors of a run's last checkpoint, the rest of it, and its log without what depends on the clock."""
    _, state = small_state(folder.parent / "unused", **settings)
    state.load(Checkpoints(folder / "checkpoints", RANKS))
    state.feeder.close()
    tensors = tensors_of(state)
    meta = {"step": state.trainer.step_number, "feeder": state.feeder.state_dict()}
    meta["heard"] = (state.progress.utterances, state.progress.seconds)
    with (folder / "log.csv").open(newline="") as file:
        rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in csv.DictReader(file)]
    return tensors, meta, json.dumps(rows)


CLOCK = ("ms_per_step", "utterances_per_second", "memory_gb")


def assert_same_run(one: Path, other: Path, settings: dict[str, str] = RANDOM) -> None:
    tensors, meta, log = final(one, settings)
    tensors2, meta2, log2 = final(other, settings)
    assert tensors.keys() == tensors2.keys()
    assert {kind.split()[0] for kind in tensors} == {"weights", "average", "exp_avg", "exp_avg_sq", "step"}
    different = [name for name, value in tensors.items() if not torch.equal(value, tensors2[name])]
    assert different == []
    assert meta == meta2
    assert log == log2
    assert checkpoint.read_config(one / "model")[1] == checkpoint.read_config(other / "model")[1]


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    train = Trainer.step

    def train_then_tell(self, batches):
        train(self, batches)
        if self.step_number == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "step", train_then_tell)


@pytest.mark.parametrize("step", [3, 4])
def test_sigterm_saves_and_resuming_goes_on_bit_for_bit(step, whole, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(step, patch, signal.SIGTERM)
        assert main(small_args(folder, **RANDOM)) is False
    assert f"stopped at step {step}" in capsys.readouterr().err
    assert (folder / "checkpoints" / f"step-{step:08}").is_dir()
    assert not (folder / "model").exists()
    assert main(small_args(folder, resume=True)) is True
    assert_same_run(folder, whole)


def test_a_bank_of_spectrograms_resumes_bit_for_bit(tmp_path, monkeypatch):
    settings = {"feeder": "bank", "steps": "4", "decoder__dropout": "0.2", "sampler__speeds": "0.9,1.0,1.1"}
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert main(small_args(whole, **settings))
    with monkeypatch.context() as patch:
        stop_at(3, patch, signal.SIGTERM)
        assert main(small_args(folder, **settings)) is False
    assert main(small_args(folder, resume=True))
    assert_same_run(folder, whole, settings)


def test_a_kill_between_checkpoints_loses_nothing_else(whole, tmp_path):
    """kill -9 after step 5, with the last checkpoint at step 4."""
    folder = tmp_path / "run"
    script = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import pytest, pathlib
from test_train_resume import RANDOM, stop_at
from small_run import small_args
from whisfusion.train import main
with pytest.MonkeyPatch.context() as patch:
    stop_at(5, patch, signal.SIGKILL)
    main(small_args(pathlib.Path({str(folder)!r}), **RANDOM))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert main(small_args(folder, resume=True))
    assert_same_run(folder, whole)


@pytest.mark.parametrize("damage", ["flipped byte", "missing file", "cut short", "no meta"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    last = folder / "checkpoints" / "step-00000006"
    data = next(last.glob("*.distcp"))
    if damage == "flipped byte":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage == "missing file":
        data.unlink()
    elif damage == "cut short":
        os.truncate(data, data.stat().st_size // 2)
    else:
        (last / "meta.json").unlink()
    assert main(small_args(folder, resume=True))
    said = capsys.readouterr().err
    assert "step-00000006 is damaged" in said
    assert "going on at step 4" in said
    assert_same_run(folder, whole)


def test_loading_leaves_gradient_buffers_in_place(whole, tmp_path):
    """Captured graphs add to gradients in fixed places, which are there before anything is loaded."""
    _, state = small_state(tmp_path / "unused", **RANDOM)
    buffers = {}
    for name, parameter in state.trainer.decoder.named_parameters():
        parameter.grad = buffers[name] = torch.zeros_like(parameter)
    state.load(Checkpoints(whole / "checkpoints", RANKS))
    state.feeder.close()
    assert any(name.startswith("exp_avg ") for name in tensors_of(state))
    assert all(p.grad is buffers[name] for name, p in state.trainer.decoder.named_parameters())


def test_with_all_checkpoints_damaged_it_says_so(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for meta in folder.glob("checkpoints/*/meta.json"):
        meta.unlink()
    with pytest.raises(ModelError, match=r"no checkpoint in .* is whole"):
        main(small_args(folder, resume=True))


def test_two_checkpoints_are_kept_and_none_is_half_written(whole):
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]


def test_a_finished_run_stays_finished(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert main(small_args(folder, resume=True))
    assert_same_run(folder, whole)


def test_a_resumed_run_keeps_its_recipe(whole):
    args = small_args(whole, learning_rate="1e-5")
    with pytest.raises(OptionError, match="already holds a run"):
        main(args)
    with pytest.raises(OptionError, match="keeps its learning_rate: leave"):
        main(replace(args, resume=True))


def test_a_resumed_run_may_change_how_it_is_computed(tmp_path, monkeypatch):
    """Micro-batches are another way to the same step; here nearly, for sums are taken in another order."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    with monkeypatch.context() as patch:
        stop_at(2, patch, signal.SIGTERM)
        main(small_args(folder))
    given = {"accumulate": "2", "checkpoint_activations": "true"}
    assert main(replace(small_args(folder, resume=True), settings=given))
    assert json.loads((folder / "config.json").read_text())["recipe"]["accumulate"] == 2
    assert main(small_args(whole))
    losses = [[row["loss"] for row in read_csv(run / "log.csv")] for run in (folder, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(OptionError, match="no run to resume"):
        main(small_args(tmp_path / "nothing", resume=True))


def test_other_data_cannot_be_resumed_on(whole, tmp_path, make_manifest):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    other = make_manifest("other", [1.2] * 12)
    with pytest.raises(OptionError, match="not those of the checkpoint"):
        main(replace(small_args(folder, resume=True), data=(str(other),)))
