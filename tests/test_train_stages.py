"""Stages in one command: each from the model of the one before, nothing made twice, and resumed where it stopped."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from small_run import CLIPS, SMALL, small_args
from test_train_resume import stop_at

from whisfusion import checkpoint
from whisfusion.errors import OptionError
from whisfusion.train import TrainArgs, launch, main
from whisfusion.train.dev import DevSet
from whisfusion.train.loop import Run
from whisfusion.train.overrides import on_top
from whisfusion.train.prepare import Stage
from whisfusion.train.stages import prepare_stages

# The first stage has an adapter, which a later recipe `tiny` has not by itself.
ADAPTER = {"decoder.adapter": "1", "decoder.reach": "3", "learns": "adapter"}
BANK = {"feeder": "bank", "decoder__adapter": "1", "decoder__reach": "3", "steps": "3", "dev_clips": "2"}
THEN = (Stage("tiny", {"steps": "4"}), Stage("tiny", {"steps": "3", "learning_rate": "1e-4"}))


def three_stages(out, **settings):
    args = small_args(out, **BANK | settings)
    return replace(args, dev=(str(CLIPS),), then=THEN)


def weights(model):
    return checkpoint.load(model, dtype=torch.float32).decoder.state_dict()


@pytest.fixture
def made(monkeypatch):
    """What was made of the shared things, by name."""
    counts = []
    build, load = launch.build_bank, DevSet.__init__
    monkeypatch.setattr(launch, "build_bank", lambda *a, **k: counts.append("bank") or build(*a, **k))
    monkeypatch.setattr(DevSet, "__init__", lambda self, *a: counts.append("dev") or load(self, *a))
    return counts


def test_stages_are_runs_one_after_another(tmp_path, made):
    assert main(three_stages(tmp_path / "all"))
    assert sorted(made) == ["bank", "dev"]
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == ["1-tiny", "2-tiny", "3-tiny", "stages.json"]
    # The same by hand.
    runs = [tmp_path / str(number) for number in range(3)]
    for run, before, stage in zip(runs, [None, *runs], [Stage("tiny"), *THEN], strict=False):
        args = small_args(run, **BANK)
        start = str(before / "model") if before else None
        args = replace(args, init_from=start, dev=(str(CLIPS),), settings={**args.settings, **stage.settings})
        assert main(args)
    for run, name in zip(runs, names, strict=False):
        one, other = weights(run / "model"), weights(tmp_path / "all" / name / "model")
        assert all(torch.equal(value, other[key]) for key, value in one.items())
        log, log2 = ((folder / "dev.csv").read_text() for folder in (run, tmp_path / "all" / name))
        assert log == log2


def test_a_stage_can_start_from_an_earlier_one(tmp_path):
    control = Stage("tiny", {"steps": "4"}, "1-tiny")
    branched = replace(three_stages(tmp_path / "all"), then=(THEN[0], control))
    assert main(branched)
    second, third = (weights(tmp_path / "all" / name / "model") for name in ("2-tiny", "3-tiny"))
    assert all(torch.equal(value, third[key]) for key, value in second.items())
    # One that is resumed knows where it was to start.
    shutil.rmtree(tmp_path / "all" / "3-tiny")
    assert main(TrainArgs(out=tmp_path / "all", resume=True))
    again = weights(tmp_path / "all" / "3-tiny" / "model")
    assert all(torch.equal(value, again[key]) for key, value in third.items())
    with pytest.raises(OptionError, match="2-tiny: --init_from 3-tiny is no stage before it: choose one of 1-tiny"):
        prepare_stages(replace(branched, out=tmp_path / "x", then=(Stage("tiny", {"steps": "4"}, "3-tiny"),)))


def test_what_stages_do_not_agree_on_is_made_anew(tmp_path, made):
    args = three_stages(tmp_path / "run", warmup_steps="1", steps="2")
    slower = Stage("tiny", {"sampler.speeds": "0.9,1.0"})
    fewer = Stage("tiny", {"filters.max_seconds": "3", "sampler.speeds": "0.9,1.0", "dev_clips": "1"})
    assert main(replace(args, then=(slower, fewer)))
    assert made == ["bank", "dev", "bank", "bank", "dev"]


def test_a_later_stage_has_the_architecture_of_the_one_before(tmp_path):
    args = replace(small_args(tmp_path / "run"), then=(Stage("finetune", {"epochs": "1"}),))
    del (settings := dict(args.settings))["decoder.layers"]
    first, second = prepare_stages(replace(args, settings=settings | ADAPTER | {"learns": "all"}))[0]
    assert second.recipe.decoder == replace(first.recipe.decoder, dropout=second.recipe.decoder.dropout)
    assert second.recipe.decoder.adapter == 1
    assert (second.recipe.window, second.recipe.random_encoder) == ("clip", first.recipe.random_encoder)
    assert second.init_from == str(tmp_path / "run" / "1-tiny" / "model")
    assert second.filtered is first.filtered
    assert second.recipe.steps is None


def test_a_stage_length_replaces_that_of_all():
    assert on_top({"steps": "9", "seed": "1"}, {"minutes": "2"}) == {"seed": "1", "minutes": "2"}
    assert on_top({"steps": "9", "seed": "1"}, {"seed": "2"}) == {"steps": "9", "seed": "2"}


def test_everything_wrong_in_any_stage_is_said_before_the_first(tmp_path):
    args = replace(
        small_args(tmp_path / "run", floor="2"),
        data=(str(CLIPS), str(tmp_path / "nowhere.jsonl")),
        then=(Stage("cake"), Stage("tiny", {"floor": "0.1", "warmup_steps": "9"})),
    )
    with pytest.raises(OptionError) as caught:
        main(args)
    message = str(caught.value)
    assert message.startswith("4 problems, nothing was trained:")
    for part in (
        "\n  1-tiny: floor must be between 0 and 1",
        "\n  2-cake: there is no recipe 'cake'",
        "\n  3-tiny: warmup_steps 9 must be fewer than the 6 steps",
    ):
        assert part in message
    # What is wrong for all of them is said once.
    assert message.count("nowhere.jsonl: no such file") == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_each_stage(tmp_path, capsys):
    args = three_stages(tmp_path / "run")
    timed = Stage("tiny", {"minutes": "2"})
    assert main(replace(args, then=(timed,), dry_run=True))
    said = capsys.readouterr().out
    assert "Stage 1-tiny, from its start" in said
    assert f"Stage 2-tiny, from {tmp_path / 'run' / '1-tiny' / 'model'}" in said
    assert "2:00, as asked" in said
    assert said.count("Nothing was trained") == 1
    assert not (tmp_path / "run").exists()


def test_resuming_goes_on_at_the_stage_where_it_stopped(tmp_path, monkeypatch, capsys):
    assert main(three_stages(tmp_path / "whole"))
    capsys.readouterr()
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        # Only the second stage has four steps.
        patch.setattr("whisfusion.train.loop.Run.export", _export_unless(4))
        with pytest.raises(RuntimeError, match="stopped here"):
            main(three_stages(folder))
    assert not (folder / "2-tiny" / "model").exists()
    # It may be somewhere else by then.
    moved = folder.rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(small_args(moved, resume=True))
    said = capsys.readouterr().err
    assert "stage 1-tiny" not in said
    assert "stage 2-tiny" in said
    for name in ("2-tiny", "3-tiny"):
        one, other = weights(moved / name / "model"), weights(tmp_path / "whole" / name / "model")
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert main(small_args(moved, resume=True))
    assert "all stages are done" in capsys.readouterr().err


def _export_unless(step):
    export = Run.export

    def guarded(self, folder):
        if self.state.trainer.step_number == step:
            raise RuntimeError("stopped here")
        export(self, folder)

    return guarded


def test_a_stop_between_steps_says_which_folder_to_resume(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(2, patch, signal.SIGTERM)
        assert main(three_stages(folder)) is False
    assert f"go on with --resume --out {folder}\n" in capsys.readouterr().err
    assert not (folder / "2-tiny").exists()
    with pytest.raises(OptionError, match="already holds a run"):
        main(three_stages(folder))
    with pytest.raises(OptionError, match="already holds a run"):
        main(small_args(folder))
    with pytest.raises(OptionError, match="leave out --then"):
        main(replace(three_stages(folder), resume=True, settings={}))
    with pytest.raises(OptionError, match="keeps its seed"):
        main(replace(small_args(folder, resume=True), settings={"seed": "3"}))
    assert main(replace(small_args(folder, resume=True), settings={"log_every": "2"}))
    recipes = [json.loads((folder / f"{n}-tiny" / "config.json").read_text())["recipe"] for n in (1, 2, 3)]
    assert [recipe["log_every"] for recipe in recipes] == [2, 2, 2]
    assert [recipe["steps"] for recipe in recipes] == [3, 4, 3]


def test_there_must_be_stages_to_resume(tmp_path):
    with pytest.raises(OptionError, match="no run of several stages to resume"):
        main(replace(three_stages(tmp_path / "run"), resume=True))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stages.json").write_text("{}")
    with pytest.raises(OptionError, match=r"stages\.json cannot be read"):
        main(small_args(tmp_path / "run", resume=True))


def test_settings_of_all_stages_are_those_of_the_first(tmp_path):
    jobs, plan = prepare_stages(three_stages(tmp_path / "run"))
    assert plan is not None
    assert [stage.settings["decoder.layers"] for stage in plan.stages] == [SMALL["decoder.layers"]] * 3
    assert [job.steps for job in jobs] == [3, 4, 3]
