"""Runs with a time to keep."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import CLIPS, small_args, small_recipe
from test_train_resume import stop_at

from whisfusion.errors import OptionError
from whisfusion.train import main
from whisfusion.train.budget import Budget, fitting
from whisfusion.train.log import read_csv
from whisfusion.train.overrides import override
from whisfusion.train.state import Progress


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def simulate(clock, budget, speeds, progress, *, eval_every=10**9, evaluation=0.0, first=0):
    """Go through a run whose step s takes speeds(s) seconds; returns its steps and all expectations."""
    step, steps, read_at, began = first, first + 1, first, clock.now
    expected = []
    while step < steps:
        clock.now += speeds(step)
        step += 1
        evaluates = step % eval_every == 0
        if step == steps or budget.due(step) or evaluates:
            steps = budget.steps(step, step - read_at, clock.now - began)
            budget.plan_look(step, steps)
            progress.expected_steps = steps
            expected.append((step, steps))
            read_at = step
            if evaluates or step >= steps:
                clock.now += evaluation
                progress.evaluation_seconds = evaluation
            began = clock.now
    return step, expected


def made(clock, progress, *, evaluates=False, **settings):
    recipe = override(small_recipe(), {"minutes": "10", "log_every": "50"} | settings)
    return Budget(recipe, progress, clock.now, evaluates=evaluates)


def test_the_number_of_steps_follows_from_the_time(clock):
    progress = Progress()
    # Four steps compile for 20 s each.
    steps, expected = simulate(clock, made(clock, progress), lambda s: 20.0 if s in (0, 1, 3, 7) else 0.1, progress)
    assert steps == pytest.approx((600 - 80) / 0.1, rel=0.01)
    assert 598 < clock.now <= 600.1
    # After a hundred steps it knew.
    assert all(total == pytest.approx(steps, rel=0.02) for step, total in expected if step >= 100)


def test_a_machine_that_slows_down_still_keeps_the_time(clock):
    progress = Progress()
    simulate(clock, made(clock, progress), lambda s: 0.1 if s < 3000 else 0.3, progress)
    assert 598 < clock.now <= 601


def test_evaluations_on_the_way_and_at_the_end_are_reserved(clock):
    progress = Progress()
    budget = made(clock, progress, evaluates=True, eval_every="1000")
    simulate(clock, budget, lambda s: 0.1, progress, eval_every=1000, evaluation=30.0)
    assert 590 < clock.now <= 601


def test_compiling_does_not_end_a_run(clock):
    progress = Progress()
    steps, _ = simulate(clock, made(clock, progress), lambda s: 400.0 if s == 0 else 0.1, progress)
    assert steps == pytest.approx(2000, rel=0.01)


def test_steps_that_take_minutes_keep_the_time_too(clock):
    progress = Progress()
    steps, _ = simulate(clock, made(clock, progress), lambda s: 70.0, progress)
    assert steps in (8, 9)
    assert clock.now <= 600 + 70


def test_a_resumed_run_has_the_time_that_is_left(clock):
    progress = Progress(elapsed=300.0, expected_steps=6000)
    budget = made(clock, progress)
    steps, expected = simulate(clock, budget, lambda s: 40.0 if s == 3000 else 0.1, progress, first=3000)
    assert clock.now == pytest.approx(300, abs=1)
    assert steps == pytest.approx(3000 + 2600, rel=0.01)
    # What compiling suggests is not believed.
    assert expected[0] == (3001, 6000)


def test_an_evaluation_that_would_not_fit_is_the_last():
    assert fitting(0, 100.0, 1.0, evaluation=0, eval_every=10) == 100
    assert fitting(0, 9.5, 1.0, evaluation=5, eval_every=10) == 9
    assert fitting(0, 13.0, 1.0, evaluation=5, eval_every=10) == 10
    assert fitting(0, 18.0, 1.0, evaluation=5, eval_every=10) == 13
    assert fitting(10, 18.0, 1.0, evaluation=5, eval_every=10) == 23
    assert fitting(7, -1.0, 1.0, evaluation=5, eval_every=10) == 7


def test_a_run_takes_the_time_that_it_is_given(tmp_path):
    began = time.perf_counter()
    settings = {"minutes": "0.1", "steps": "none", "warmup_steps": "2", "floor": "0.01", "eval_every": "20"}
    args = small_args(tmp_path / "run", **settings | {"dev_clips": "2", "log_every": "10", "save_every": "1000"})
    assert main(replace(args, dev=(str(CLIPS),)))
    taken = time.perf_counter() - began
    rows = read_csv(tmp_path / "run" / "log.csv")
    assert rows[-1]["step"] > 20
    assert 4 < taken < 12
    assert rows[-1]["learning_rate"] < 0.02 * small_recipe().learning_rate
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert read_csv(tmp_path / "run" / "dev.csv")[-1]["step"] == rows[-1]["step"]


def test_a_stopped_run_has_spent_its_time(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(5, patch, signal.SIGTERM)
        assert main(small_args(folder, minutes="0.05", steps="none")) is False
    meta = _meta(folder)
    assert meta["progress"]["elapsed"] > 0
    assert meta["progress"]["expected_steps"] > 5
    assert main(small_args(folder, resume=True))
    assert _meta(folder)["progress"]["elapsed"] < 8
    # It is over.
    steps = _meta(folder)["step"]
    assert main(small_args(folder, resume=True))
    assert _meta(folder)["step"] == steps


def _meta(folder: Path):
    last = max((folder / "checkpoints").iterdir())
    return json.loads((last / "meta.json").read_text())


@pytest.mark.parametrize(
    "given", [{"minutes": "2", "steps": "9"}, {"minutes": "none"}, {"epochs": "1", "minutes": "1"}]
)
def test_a_run_has_one_length(given):
    with pytest.raises(OptionError, match="one of epochs, steps and minutes"):
        override(small_recipe(), given)


def test_minutes_are_positive_and_unset_the_others():
    with pytest.raises(OptionError, match="positive number of epochs, steps or minutes"):
        override(small_recipe(), {"minutes": "0"})
    recipe = override(small_recipe(), {"minutes": "2.5"})
    assert (recipe.minutes, recipe.steps, recipe.epochs) == (2.5, None, None)
