"""All that a resumed run needs: weights, average, optimizer, step, the feeder's place, what was counted."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from whisfusion.data.batch import Feeder
from whisfusion.train.checkpoints import Checkpoints
from whisfusion.train.trainer import Trainer


@dataclass
class Progress:
    """What a run has done so far, over all ranks and all of its starts."""

    utterances: int = 0
    seconds: float = 0.0
    """Of speech heard."""
    clips_failed: int = 0
    best_wer: float | None = None
    best_step: int | None = None
    train_seconds: float = 0.0
    """Of wall-clock time spent on steps."""
    elapsed: float = 0.0
    """Seconds of wall-clock time from the run's start to its last reading, its stops left out."""
    evaluation_seconds: float = 0.0
    """What the last evaluation took."""
    saving_seconds: float = 0.0
    """What the last checkpoint took."""
    expected_steps: int = 0
    """Of the whole run, at its last reading; a run with a time to keep has no other number."""


@dataclass
class TrainState:
    """One object to save and to load."""

    trainer: Trainer
    feeder: Feeder
    progress: Progress

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint of now; all ranks must call it together."""
        meta = {"feeder": self.feeder.state_dict(), "progress": asdict(self.progress)}
        checkpoints.save(self.trainer.step_number, self._tensors(), meta)

    def load(self, checkpoints: Checkpoints) -> list[str]:
        """Go back to the newest whole checkpoint; returns sentences on damaged ones. Without any, nothing changes."""
        found = checkpoints.newest()
        if found is None:
            return []
        checkpoint, meta, warnings = found
        trainer = self.trainer
        with _gradients_aside(trainer.decoder):
            tensors = self._tensors()
        checkpoints.load(checkpoint, tensors)
        set_model_state_dict(trainer.decoder, tensors["model"])
        set_optimizer_state_dict(trainer.decoder, trainer.optimizer, tensors["optimizer"])
        trainer.ema.load(tensors["ema"])
        trainer.skip_to(meta["step"])
        self.feeder.load_state_dict(meta["feeder"])
        self.progress = Progress(**meta["progress"])
        if trainer.recipe.minutes is not None:
            trainer.steps = max(trainer.step_number, self.progress.expected_steps)
        return warnings

    def _tensors(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "model": get_model_state_dict(trainer.decoder),
            "optimizer": get_optimizer_state_dict(trainer.decoder, trainer.optimizer),
            "ema": dict(trainer.ema.averages),
        }


@contextmanager
def _gradients_aside(module: nn.Module) -> Generator[None]:
    """Take gradients away for a while: torch makes an optimizer's first moments only where there are none."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
