"""Many clips at once, on the device, at another speed. Letters: B clips, N samples, K frequencies."""

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

# The top of the band fades out over this share of it: an edge as sharp as the transform allows would ring.
_FADE = 0.05
# Transforms of a multiple of this many times the speed's numerator have small prime factors, and are fast.
_GRAIN = 512


def length_at_speed(n_samples: int, speed: float) -> int:
    """Samples of a clip of `n_samples` after `change_speed`: n / speed, rounded to the nearest."""
    ratio = _ratio(speed)
    return (2 * n_samples * ratio.denominator + ratio.numerator) // (2 * ratio.numerator)


def change_speed(samples_BN: Tensor, lengths: Sequence[int], speed: float) -> Tensor:
    """Play clips `speed` times as fast, pitch included: band-limited resampling through the spectrum.

    samples_BN: float, zero beyond each clip's `lengths` in samples. A tenth of a second of such zeros keeps a
    clip's end from ringing into its beginning. The result, on the same device, is zero beyond each clip's
    `length_at_speed`, and long enough for all of them.
    """
    ratio = _ratio(speed)
    if ratio == 1:
        return samples_BN
    grains = -(-samples_BN.shape[1] // (_GRAIN * ratio.numerator))
    before, after = (_GRAIN * grains * part for part in (ratio.numerator, ratio.denominator))
    # The buffer keeps its number of cycles and changes its number of samples. K frequencies are in both.
    band = min(before, after) // 2 + 1
    spectrum_BK = torch.fft.rfft(samples_BN.float(), before)[:, :band]
    fade_K = (torch.linspace(1, 0, band, device=samples_BN.device) / _FADE).clamp(max=1)
    spectrum_BK = spectrum_BK * (0.5 - 0.5 * torch.cos(torch.pi * fade_K)) * (after / before)
    changed_BN = torch.fft.irfft(spectrum_BK, after)
    ends_B1 = torch.tensor([length_at_speed(n, speed) for n in lengths], device=samples_BN.device)[:, None]
    return changed_BN * (torch.arange(after, device=samples_BN.device) < ends_B1)


def _ratio(speed: float) -> Fraction:
    """0.9 is meant as 9 / 10, not as the nearest binary fraction."""
    return Fraction(speed).limit_denominator(100)
