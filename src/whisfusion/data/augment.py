"""Changes to what is heard in training that leave what is said alone.

Letters: B clips, M mel bins, F frames, N bands or spans, S bins or frames.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whisfusion.data.speed import change_speed, length_at_speed
from whisfusion.errors import OptionError

# Silence after a clip that keeps its end from ringing into its beginning when its speed is changed.
_GUARD_SAMPLES = 1_600
# Whisper's log-mel of 1 is four powers of ten.
_DECIBEL = 40.0
_NATS = 4 * math.log(10)
_BELOW = (12.0, 30.0)
# Random numbers for warp and tilt, and two for the mix.
_OTHER_NUMBERS = 4


@dataclass(frozen=True)
class SpecAugment:
    """Changes to a spectrogram: bands and spans set to 0, and others beside them; the defaults change nothing."""

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
    warp: float = 0.0
    """Mel bins are read from up to this share further up or down, as if from a smaller or larger head."""
    tilt: float = 0.0
    """Decibels by which the highest bin gains or loses on the lowest at most, as through another microphone."""
    mix: float = 0.0
    """Share of the clips that have another one of the batch in the background, 12 to 30 dB below at the peak."""

    def __post_init__(self) -> None:
        """Report every field that is out of range."""
        problems = [
            f"spec_augment.{name} must not be negative, not {getattr(self, name)}"
            for name in ("bands", "band_bins", "spans", "span_frames", "tilt")
            if getattr(self, name) < 0
        ]
        problems += [
            f"spec_augment.{name} must be between 0 and 1, not {getattr(self, name)}"
            for name in ("span_share", "mix")
            if not 0 <= getattr(self, name) <= 1
        ]
        if not 0 <= self.warp < 1:
            problems.append(f"spec_augment.warp must be at least 0 and below 1, not {self.warp}")
        OptionError.collect(problems)

    @property
    def changes(self) -> bool:
        """Whether anything is changed at all."""
        return bool(self.bands or self.spans or self.warp or self.tilt or self.mix)

    @property
    def numbers(self) -> int:
        """Random numbers that a clip takes: a width and a place for each band and span, and those of the rest."""
        return 2 * (self.bands + self.spans) + _OTHER_NUMBERS if self.changes else 0


def spec_augment(mel_BMF: Tensor, frames_B: Tensor, options: SpecAugment, uniforms_BN: Tensor) -> Tensor:
    """Change spectrograms: widths and places are uniform, spans lie inside their clip.

    uniforms_BN: `options.numbers` numbers in [0, 1) for each clip, on the device of the spectrograms.
    """
    if not options.changes:
        return mel_BMF
    warp_B, tilt_B, mixed_B, below_B = uniforms_BN[:, :_OTHER_NUMBERS].unbind(1)
    if options.warp:
        mel_BMF = _warped(mel_BMF, 1 + options.warp * (2 * warp_B - 1))
    if options.tilt:
        mel_BMF = _tilted(mel_BMF, options.tilt * (2 * tilt_B - 1))
    if options.mix:
        below_B = torch.where(mixed_B < options.mix, _BELOW[0] + (_BELOW[1] - _BELOW[0]) * below_B, torch.inf)
        mel_BMF = _mixed(mel_BMF, frames_B, below_B)
    mels, frames = mel_BMF.shape[1:]
    width_BN, place_BN = uniforms_BN[:, _OTHER_NUMBERS:].chunk(2, dim=1)
    bands, spans = slice(0, options.bands), slice(options.bands, None)
    longest_B1 = (frames_B[:, None] * options.span_share + 2).clamp(max=options.span_frames).floor()
    widest = min(options.band_bins, mels)
    bins_BM = _covered(width_BN[:, bands] * (widest + 1), place_BN[:, bands], mels, mels)
    frames_BF = _covered(width_BN[:, spans] * (longest_B1 + 1), place_BN[:, spans], frames_B[:, None], frames)
    return mel_BMF.masked_fill(bins_BM[:, :, None] | frames_BF[:, None, :], 0.0)


def _warped(mel_BMF: Tensor, factor_B: Tensor) -> Tensor:
    """Bin i becomes bin `factor` times i, between two of them in proportion; beyond the last is the last."""
    last = mel_BMF.shape[1] - 1
    from_BM = (torch.arange(last + 1, device=mel_BMF.device) * factor_B[:, None]).clamp(max=last)
    low_BM = from_BM.long()
    share_BM1 = (from_BM - low_BM)[:, :, None]
    low_BMF, high_BMF = (
        mel_BMF.gather(1, bin_BM[:, :, None].expand_as(mel_BMF)) for bin_BM in (low_BM, (low_BM + 1).clamp(max=last))
    )
    return low_BMF + share_BM1 * (high_BMF - low_BMF)


def _tilted(mel_BMF: Tensor, decibel_B: Tensor) -> Tensor:
    """The highest bin gains half of `decibel`, the lowest loses as much."""
    slope_M = torch.linspace(-0.5, 0.5, mel_BMF.shape[1], device=mel_BMF.device)
    return mel_BMF + (decibel_B[:, None] * slope_M / _DECIBEL)[:, :, None]


def _mixed(mel_BMF: Tensor, frames_B: Tensor, below_B: Tensor) -> Tensor:
    """Each clip with the one before it in its batch in the background, `below` dB below it at the peak.

    At infinity there is no background.
    """
    own_BF = torch.arange(mel_BMF.shape[2], device=mel_BMF.device) < frames_B[:, None]
    own_BMF = mel_BMF.float().masked_fill(~own_BF[:, None], -torch.inf)
    # A clip that could not be read has no frames, and no peak.
    peak_B11 = own_BMF.amax((1, 2), keepdim=True).clamp(min=-_DECIBEL)
    behind_BMF = (own_BMF - peak_B11).roll(1, 0) + peak_B11 - below_B[:, None, None] / _DECIBEL
    # Power is what adds up.
    return torch.logaddexp(mel_BMF.float() * _NATS, behind_BMF * _NATS) / _NATS


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
