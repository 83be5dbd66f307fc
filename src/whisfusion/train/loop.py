"""The run itself: steps, and between them what is read, evaluated, saved and exported."""

import math
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from whisfusion import checkpoint
from whisfusion.checkpoint import ModelConfig
from whisfusion.data.batch import Step
from whisfusion.errors import WhisfusionError
from whisfusion.train import schedule
from whisfusion.train.checkpoints import Checkpoints
from whisfusion.train.dev import DevSet
from whisfusion.train.display import Display
from whisfusion.train.log import RunLog
from whisfusion.train.meter import Meter
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
    dev: DevSet | None = None
    bundle_encoder: bool = False
    """Whether exported models hold the encoder too."""

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
                done, stopping = step == trainer.steps, stop()
                evaluating = self.dev is not None and (step % recipe.eval_every == 0 or done)
                saving = step % recipe.save_every == 0 or done or stopping
                if step % recipe.log_every == 0 or evaluating or saving:
                    self._read(meter)
                if evaluating:
                    self._evaluate()
                if saving:
                    self.state.save(self.checkpoints)
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
        checkpoint.save(
            temporary,
            replace(self.config, training={**self.config.training, **facts}),
            averages,
            encoder=trainer.encoder.state_dict() if self.bundle_encoder else None,
            generation=trainer.recipe.dev,
        )
        _replace_folder(temporary, folder)

    def _steps(self) -> Iterator[Step]:
        """The feeder's steps, as many as are left."""
        trainer = self.state.trainer
        left = trainer.steps - trainer.step_number
        if left > 0:
            for _, batches in zip(range(left), self.state.feeder, strict=False):
                yield batches

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
        epoch = self.state.feeder.state_dict()["epoch"]
        rate = schedule.learning_rate(trainer.recipe, step - 1, trainer.steps)
        self.log.step(step, epoch, rate, readings, counted.speed, progress)
        self.display.show(step, readings, counted.speed, progress.seconds / 3600)
        failures = [f for part in trainer.ranks.gather(self.state.feeder.failures()) for f in part]
        if failures:
            progress.clips_failed += len(failures)
            self.log.skipped(step, failures)
            more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            self.display.say(f"left out {failures[0].id} ({failures[0].reason}){more}: see skipped.jsonl")

    def _evaluate(self) -> None:
        trainer, progress = self.state.trainer, self.state.progress
        if self.dev is None:
            return
        result = self.dev.evaluate(self.config, trainer.encoder, trainer.ema, trainer.recipe)
        self.log.dev(trainer.step_number, result)
        sets = ", ".join(f"{name} {100 * rate:.2f}" for name, rate in result.by_dataset.items())
        self.display.say(f"step {trainer.step_number}: dev WER {100 * result.rate:.2f} % ({sets})")
        if progress.best_wer is None or result.rate < progress.best_wer:
            progress.best_wer, progress.best_step = result.rate, trainer.step_number
            self.export(self.folder / "best")


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
