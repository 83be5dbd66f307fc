"""Changing speed on the device against soxr, and whatever else a bank relies on."""

import numpy as np
import pytest
import torch

from whisfusion.data.speed import change_speed, length_at_speed

SPEEDS = (0.9, 1.1, 0.8, 1.25)
# Relative error over a band that both filters pass.
SOXR_TOLERANCE = 1e-3
GUARD = 2_560


def band_limited(count, seed):
    """Noise below 6 kHz: no filter at 0.8 of 8 kHz touches it."""
    rng = np.random.default_rng(seed)
    spectrum = np.fft.rfft(rng.normal(0, 0.1, count))
    spectrum[int(len(spectrum) * 0.72) :] = 0
    # Fades at the ends: what lies beyond them is not the filters' affair.
    ends = np.minimum(1, np.minimum(np.arange(count), np.arange(count)[::-1]) / 800)
    return (np.fft.irfft(spectrum, count) * ends).astype(np.float32)


def padded(clips):
    samples_BN = torch.zeros(len(clips), max(map(len, clips)) + GUARD)
    for row_N, clip in zip(samples_BN, clips, strict=True):
        row_N[: len(clip)] = torch.from_numpy(clip)
    return samples_BN


@pytest.mark.parametrize("speed", SPEEDS)
def test_against_soxr(speed):
    soxr = pytest.importorskip("soxr")
    clips = [band_limited(n, seed) for seed, n in enumerate((16_000, 48_001, 77_777))]
    changed_BN = change_speed(padded(clips), [len(clip) for clip in clips], speed).numpy()
    for row_N, clip in zip(changed_BN, clips, strict=True):
        expected = soxr.resample(clip, 16_000 * speed, 16_000, quality="VHQ")
        length = length_at_speed(len(clip), speed)
        assert abs(len(expected) - length) <= 1
        both = min(length, len(expected))
        error = np.linalg.norm(row_N[:both] - expected[:both]) / np.linalg.norm(expected)
        assert error < SOXR_TOLERANCE
        assert not row_N[length:].any()


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_tone_goes_up_with_the_speed(speed):
    tone = np.sin(2 * np.pi * 440 * np.arange(32_000) / 16_000).astype(np.float32)
    length = length_at_speed(len(tone), speed)
    heard = change_speed(padded([tone]), [len(tone)], speed)[0, :length]
    peak = torch.fft.rfft(heard).abs().argmax().item() * 16_000 / length
    assert peak == pytest.approx(440 * speed, abs=1.0)


def test_what_would_fold_over_is_taken_out():
    tone = np.sin(2 * np.pi * 7_800 * np.arange(32_000) / 16_000).astype(np.float32)
    heard = change_speed(padded([tone]), [len(tone)], 1.1)[0]
    # 7.8 kHz would be 8.58 kHz: without a filter it would come back at 7.42 kHz, as loud as before. Its ends click.
    assert heard[2_000:27_000].abs().max() < 1e-3


def test_neighbours_do_not_matter():
    clips = [band_limited(n, seed) for seed, n in enumerate((16_000, 90_000))]
    together = change_speed(padded(clips), [16_000, 90_000], 0.9)[0, :17_778]
    alone = change_speed(padded(clips[:1]), [16_000], 0.9)[0, :17_778]
    # Transforms of other lengths round otherwise.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_speed_one_changes_nothing():
    samples_BN = padded([band_limited(16_000, 0)])
    assert change_speed(samples_BN, [16_000], 1.0) is samples_BN
    assert length_at_speed(16_000, 1.0) == 16_000
