"""How much was heard and how fast: counted on the host, step by step."""

import sys
import time
from dataclasses import dataclass

import torch

from whisfusion.data.batch import Step
from whisfusion.train.flops import decoder_flops, encoder_flops, matrix_peak
from whisfusion.train.parallel import Ranks
from whisfusion.train.schedule import mask_ratios
from whisfusion.train.trainer import Trainer


@dataclass(frozen=True)
class Speed:
    """How fast the steps since the last reading were, over all ranks."""

    ms_per_step: float
    utterances_per_second: float
    memory_gb: float
    """The most that was allocated on this rank's device; of a CPU process the most it ever held."""
    peak_share: float | None
    """Share of the device's matrix peak, by counted FLOPs; None where that is not known."""


@dataclass(frozen=True)
class Counted:
    """What the steps since the last reading held, over all ranks."""

    steps: int
    utterances: int
    seconds: float
    train_seconds: float
    speed: Speed


class Meter:
    """Adds up what goes through a trainer. Time between `pause` and `resume` does not count."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._peak = matrix_peak(trainer.ranks.device, trainer.dtype)
        self._spent = 0.0
        self._clear()
        self.resume()

    def add(self, step: Step) -> None:
        """Count a step that was handed to the trainer."""
        trainer = self._trainer
        self._steps += 1
        for batch in step:
            self._utterances += len(batch.ids)
            self._seconds += batch.seconds
            if self._peak is not None:
                frames, positions = batch.mel_BMF.shape[2], batch.targets.tokens_BL.shape[1]
                ratios = mask_ratios(trainer.recipe, trainer.step_number - 1, trainer.steps)
                predicted = int(batch.targets.scored_BL.sum()) * (ratios.low + ratios.high) / 2
                self._flops += encoder_flops(trainer.encoder.config, len(batch.ids), frames)
                self._flops += decoder_flops(
                    trainer.decoder.config, len(batch.ids), positions, frames // 2, round(predicted)
                )

    def pause(self) -> None:
        """Stop the clock: what follows is not training."""
        self._spent += time.perf_counter() - self._since

    def resume(self) -> None:
        """Start the clock again."""
        self._since = time.perf_counter()

    def read(self) -> Counted:
        """The counts since the last reading; the device must have finished. All ranks must call it together."""
        self.pause()
        counts = self._trainer.ranks.gather((self._utterances, self._seconds))
        utterances, seconds = (sum(part) for part in zip(*counts, strict=True))
        share = None if self._peak is None else self._flops / max(self._spent, 1e-9) / self._peak
        counted = Counted(
            steps=self._steps,
            utterances=int(utterances),
            seconds=seconds,
            train_seconds=self._spent,
            speed=Speed(
                ms_per_step=1000 * self._spent / max(1, self._steps),
                utterances_per_second=utterances / max(self._spent, 1e-9),
                memory_gb=memory_gb(self._trainer.ranks),
                peak_share=share,
            ),
        )
        self._clear()
        self.resume()
        return counted

    def _clear(self) -> None:
        self._steps = self._utterances = 0
        self._seconds = self._flops = self._spent = 0.0


def memory_gb(ranks: Ranks) -> float:
    """Gigabytes of device memory that PyTorch had in use at most; of main memory on a CPU."""
    if ranks.device.type == "cuda":
        return torch.cuda.max_memory_allocated(ranks.device) / 1e9
    if sys.platform == "win32":
        return 0.0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
