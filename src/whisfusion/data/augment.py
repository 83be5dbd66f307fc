"""Changes to what is heard in training that leave what is said alone.

Letters: B clips, M mel bins, F frames, N bands or spans, S bins or frames.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whisfusion.data.speed import change_speed, length_at_speed
from whisfusion.errors import OptionError

# Silence after a clip that keeps its end from ringing into its beginning when its speed is changed.
_GUARD_SAMPLES = 1_600


@dataclass(frozen=True)
class SpecAugment:
    """Bands of frequencies and spans of time that are set to 0; the defaults change nothing."""

    bands: int = 0
    """Bands of mel bins in each clip."""
    band_bins: int = 14
    """The widest band, in bins."""
    spans: int = 0
    """Spans of frames in each clip."""
    span_frames: int = 40
    """The longest span, in frames."""
    span_share: float = 0.1
    """A span is at most this share of its clip and two frames long."""

    def __post_init__(self) -> None:
        """Report every field that is out of range."""
        problems = [
            f"spec_augment.{name} must not be negative, not {getattr(self, name)}"
            for name in ("bands", "band_bins", "spans", "span_frames")
            if getattr(self, name) < 0
        ]
        if not 0 <= self.span_share <= 1:
            problems.append(f"spec_augment.span_share must be between 0 and 1, not {self.span_share}")
        OptionError.collect(problems)

    @property
    def numbers(self) -> int:
        """Random numbers that a clip takes: a width and a place for each band and span."""
        return 2 * (self.bands + self.spans)


def spec_augment(mel_BMF: Tensor, frames_B: Tensor, options: SpecAugment, uniforms_BN: Tensor) -> Tensor:
    """Blank out bands and spans; widths and places are uniform, spans lie inside their clip.

    uniforms_BN: `options.numbers` numbers in [0, 1) for each clip, on the device of the spectrograms.
    """
    if not options.numbers:
        return mel_BMF
    mels, frames = mel_BMF.shape[1:]
    width_BN, place_BN = uniforms_BN.chunk(2, dim=1)
    bands, spans = slice(0, options.bands), slice(options.bands, None)
    longest_B1 = (frames_B[:, None] * options.span_share + 2).clamp(max=options.span_frames).floor()
    widest = min(options.band_bins, mels)
    bins_BM = _covered(width_BN[:, bands] * (widest + 1), place_BN[:, bands], mels, mels)
    frames_BF = _covered(width_BN[:, spans] * (longest_B1 + 1), place_BN[:, spans], frames_B[:, None], frames)
    return mel_BMF.masked_fill(bins_BM[:, :, None] | frames_BF[:, None, :], 0.0)


def _covered(width_BN: Tensor, place_BN: Tensor, room: Tensor | int, size: int) -> Tensor:
    """Which of `size` bins or frames lie in any of N stretches, each inside the first `room` of them."""
    width_BN = width_BN.floor()
    start_BN = (place_BN * (room - width_BN + 1)).floor()
    index_S = torch.arange(size, device=width_BN.device)
    inside_BNS = (index_S >= start_BN[..., None]) & (index_S < (start_BN + width_BN)[..., None])
    return inside_BNS.any(1)


def at_speed(samples: np.ndarray, speed: float) -> np.ndarray:
    """A clip played `speed` times as fast, pitch included."""
    padded_BN = torch.from_numpy(np.pad(samples, (0, _GUARD_SAMPLES)))[None]
    return change_speed(padded_BN, [len(samples)], speed)[0, : length_at_speed(len(samples), speed)].numpy()


def add_noise(samples: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    """Add white noise 10 to 40 dB below the mean power of `samples`."""
    decibel = rng.uniform(10, 40)
    loudness = float(np.sqrt(np.mean(np.square(samples), dtype=np.float64)))
    noise = rng.standard_normal(len(samples), dtype=np.float32)
    return samples + noise * np.float32(loudness * 10 ** (-decibel / 20))
