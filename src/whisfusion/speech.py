"""Long audio in windows that the encoder can hear: cut at quiet points, nothing dropped."""

import numpy as np

from whisfusion.audio import SAMPLE_RATE

LONGEST_WINDOW = 30.0
"""Seconds of audio that Whisper's encoder hears at once."""

_SEARCH = 6.0
"""How far before the end of a full window a quiet point is looked for, in seconds."""
_FRAME = SAMPLE_RATE // 50
_SMOOTH = 15
"""Frames of 20 ms that loudness is averaged over: a pause between words lasts about 0.3 s."""


def windows(samples: np.ndarray, longest: float = LONGEST_WINDOW) -> list[tuple[int, int]]:
    """Cut (first, past-the-last) sample ranges of at most `longest` seconds that cover all of `samples`.

    Each cut is at the quietest point in the last seconds of a full window.
    """
    limit, search = int(longest * SAMPLE_RATE), int(min(_SEARCH, longest / 2) * SAMPLE_RATE)
    cuts = [0]
    while len(samples) - cuts[-1] > limit:
        first = cuts[-1] + limit - search
        cuts.append(first + _quietest(samples[first : cuts[-1] + limit]))
    return list(zip(cuts, [*cuts[1:], len(samples)], strict=True))


def _quietest(samples: np.ndarray) -> int:
    """Offset of the middle of the quietest stretch; the last of equally quiet ones, so that windows stay long."""
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    energy = np.square(frames, dtype=np.float64).mean(1)
    smooth = np.convolve(energy, np.ones(_SMOOTH) / _SMOOTH, mode="valid")
    last = len(smooth) - 1 - int(np.argmin(smooth[::-1]))
    return (last + _SMOOTH // 2) * _FRAME + _FRAME // 2
