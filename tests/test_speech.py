import itertools

import numpy as np
import pytest

from whisfusion.audio import SAMPLE_RATE
from whisfusion.speech import windows


def speech_with_pauses(seconds, pauses):
    samples = np.random.default_rng(0).normal(0, 0.1, int(seconds * SAMPLE_RATE)).astype(np.float32)
    for start, end in pauses:
        samples[int(start * SAMPLE_RATE) : int(end * SAMPLE_RATE)] *= 0.001
    return samples


def test_a_window_fits_as_it_is():
    assert windows(speech_with_pauses(30.0, [])) == [(0, 480_000)]
    assert windows(np.zeros(1, np.float32)) == [(0, 1)]


@pytest.mark.parametrize("seconds", [30.001, 45.5, 61.0, 95.3, 300.0])
def test_windows_cover_everything_once_and_none_is_too_long(seconds):
    samples = speech_with_pauses(seconds, [])
    ranges = windows(samples)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(samples)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert all(0 < last - first <= 30 * SAMPLE_RATE for first, last in ranges)
    assert len(ranges) <= seconds / 24 + 1


def test_cuts_are_at_the_quiet_points():
    samples = speech_with_pauses(80.0, [(5.0, 6.0), (26.0, 26.6), (50.0, 50.5), (52.0, 52.2)])
    cuts = [first / SAMPLE_RATE for first, _ in windows(samples)[1:]]
    assert 26.0 < cuts[0] < 26.6
    assert 50.0 < cuts[1] < 50.5


def test_silence_gives_long_windows():
    assert len(windows(np.zeros(SAMPLE_RATE * 119, np.float32))) == 4
