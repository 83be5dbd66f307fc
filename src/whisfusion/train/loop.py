"""The run itself: steps, and between them what is read, evaluated, saved and exported."""

import math
import shutil
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from whisfusion import checkpoint
from whisfusion.checkpoint import ModelConfig
from whisfusion.data.batch import Step
from whisfusion.errors import WhisfusionError
from whisfusion.train import schedule
from whisfusion.train.budget import Budget
from whisfusion.train.checkpoints import Checkpoints
from whisfusion.train.dev import DevSet
from whisfusion.train.display import Display
from whisfusion.train.log import RunLog
from whisfusion.train.meter import Counted, Meter
from whisfusion.train.model import Inherited
from whisfusion.train.parallel import StopSignal
from whisfusion.train.state import TrainState


@dataclass
class Run:
    """A run with all its parts in place."""

    state: TrainState
    config: ModelConfig
    folder: Path
    checkpoints: Checkpoints
    log: RunLog
    display: Display
    budget: Budget
    dev: DevSet | None = None
    encoder: Mapping[str, Tensor] | None = None
    """The encoder's weights, where exported models hold them too."""
    inherited: Inherited | None = None
    """What exported models keep of the model that the run started from."""

    def fit(self) -> bool:
        """Train to the end and export; or, told by SIGTERM or SIGINT, save and return False."""
        trainer = self.state.trainer
        recipe, stop = trainer.recipe, StopSignal(trainer.ranks)
        meter = Meter(trainer)
        with _told_by_signals(stop):
            for batches in self._steps():
                trainer.step(batches)
                meter.add(batches)
                step = trainer.step_number
                self.display.advance(step)
                stopping = stop()
                evaluating = self.dev is not None and step % recipe.eval_every == 0
                saving = step % recipe.save_every == 0 or stopping
                if step % recipe.log_every == 0 or evaluating or saving or self._ends_or_looks(step):
                    self._read(meter)
                # A run with a time to keep may have learned just now that it ends here, or not yet.
                done = step >= trainer.steps
                evaluating, saving = evaluating or (done and self.dev is not None), saving or done
                if evaluating:
                    self._evaluate()
                if saving:
                    self._save()
                if evaluating or saving:
                    # Neither is training.
                    meter.resume()
                if stopping and not done:
                    return False
        self.export(self.folder / "model")
        return True

    def export(self, folder: Path) -> None:
        """Write a model folder of the averaged weights; all ranks must call it together."""
        trainer, progress = self.state.trainer, self.state.progress
        averages = trainer.ema.full()
        if not trainer.ranks.main:
            return
        facts = {
            "step": trainer.step_number,
            "utterances": progress.utterances,
            "hours": round(progress.seconds / 3600, 2),
            "dev_wer": progress.best_wer,
        }
        # Written beside and renamed, so that there is never half a model.
        temporary = folder.with_name(f".{folder.name}.part")
        inherited = self.inherited
        checkpoint.save(
            temporary,
            replace(self.config, training={**self.config.training, **facts}),
            averages,
            encoder=self.encoder,
            whisper=None if inherited is None or inherited.whisper is None else inherited.whisper.state_dict(),
            generation=trainer.recipe.dev if inherited is None else inherited.generation,
            # What did not learn is to stay what it was, to the last bit.
            dtype=torch.bfloat16 if trainer.recipe.learns == "all" else torch.float32,
        )
        if inherited is not None and inherited.vocabulary is not None:
            checkpoint.add(temporary, inherited.vocabulary)
        _replace_folder(temporary, folder)

    def _steps(self) -> Iterator[Step]:
        """The feeder's steps, as many as are left; how many that is may change on the way."""
        trainer, steps = self.state.trainer, iter(self.state.feeder)
        while trainer.step_number < trainer.steps:
            yield next(steps)

    def _ends_or_looks(self, step: int) -> bool:
        return step >= self.state.trainer.steps or self.budget.due(step)

    def _read(self, meter: Meter) -> None:
        """Wait for the device, and write down what came of the steps since the last time."""
        trainer, progress = self.state.trainer, self.state.progress
        step, readings, counted = trainer.step_number, trainer.read(), meter.read()
        if not math.isfinite(readings.loss):
            raise WhisfusionError(
                f"the loss is not finite at step {step}: lower learning_rate or lengthen warmup_steps, and "
                "start from a model of before with --init_from"
            )
        progress.utterances += counted.utterances
        progress.seconds += counted.seconds
        progress.train_seconds += counted.train_seconds
        rate = schedule.learning_rate(trainer.recipe, step - 1, trainer.steps)
        self._count_steps(counted)
        epoch = self.state.feeder.state_dict()["epoch"]
        self.log.step(step, epoch, rate, readings, counted.speed, progress)
        self.display.show(step, readings, counted.speed, progress.seconds / 3600)
        failures = [f for part in trainer.ranks.gather(self.state.feeder.failures()) for f in part]
        if failures:
            progress.clips_failed += len(failures)
            self.log.skipped(step, failures)
            more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            self.display.say(f"left out {failures[0].id} ({failures[0].reason}){more}: see skipped.jsonl")

    def _count_steps(self, counted: Counted) -> None:
        """Look at the clock, and expect as many steps as fit where the run has a time to keep."""
        trainer, progress = self.state.trainer, self.state.progress
        steps = self.budget.steps(trainer.step_number, counted.steps, counted.train_seconds)
        if steps is not None:
            # One clock for all ranks.
            trainer.steps = trainer.ranks.share(steps)
            self.budget.plan_look(trainer.step_number, trainer.steps)
            self.display.expect(trainer.steps)
        progress.expected_steps = trainer.steps

    def _save(self) -> None:
        began = time.perf_counter()
        self.state.progress.elapsed = self.budget.elapsed()
        self.state.save(self.checkpoints)
        self.state.progress.saving_seconds = time.perf_counter() - began

    def _evaluate(self) -> None:
        trainer, progress = self.state.trainer, self.state.progress
        if self.dev is None:
            return
        began = time.perf_counter()
        result = self.dev.evaluate(self.config, trainer.encoder, trainer.ema, trainer.recipe)
        self.log.dev(trainer.step_number, result)
        sets = ", ".join(f"{name} {100 * rate:.2f}" for name, rate in result.by_dataset.items())
        self.display.say(f"step {trainer.step_number}: dev WER {100 * result.rate:.2f} % ({sets})")
        if progress.best_wer is None or result.rate < progress.best_wer:
            progress.best_wer, progress.best_step = result.rate, trainer.step_number
            self.export(self.folder / "best")
        progress.evaluation_seconds = time.perf_counter() - began


@contextmanager
def _told_by_signals(stop: StopSignal) -> Generator[None]:
    """Let SIGTERM and SIGINT ask for a stop instead of ending the process; a second SIGINT ends it."""

    def tell(number: int, _: FrameType | None) -> None:
        if stop.told and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.told = True

    before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _replace_folder(new: Path, old: Path) -> None:
    """Put `new` in the place of `old`; whatever happens, one of them is whole."""
    aside = old.with_name(f".{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
