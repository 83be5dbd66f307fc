import numpy as np
import pytest
import torch

from whisfusion.mel import HOP, clip_frames, log_mel, log_mel_of_padded

LENGTHS = (1_600, 480_000, 16_000, 77_777, 1, 478_001, 31_999, 123_456)


def clips(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    """Noise of very different loudness, so that a maximum over the batch would show."""
    rng = np.random.default_rng(3)
    return [rng.normal(0, 10.0 ** -(i % 4), length).astype(np.float32) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("window", ["padded", "clip"])
def test_a_clip_alone_and_in_a_batch_has_the_same_bits(window, n_mels):
    batch = log_mel(clips(), n_mels=n_mels, window=window)
    for i, clip in enumerate(clips()):
        alone = log_mel([clip], n_mels=n_mels, window=window)
        frames = int(alone.frames_B[0])
        assert batch.frames_B[i] == frames
        assert torch.equal(batch.mel_BMF[i, :, :frames], alone.mel_BMF[0])


def test_the_clip_window_is_the_padded_one_cut_short():
    # The maximum is the speech's either way, so that the frames that both have must agree.
    for clip in clips((16_000, 77_777)):
        short = log_mel([clip], n_mels=80, window="clip").mel_BMF
        padded = log_mel([clip], n_mels=80).mel_BMF
        assert torch.equal(short, padded[..., : short.shape[-1]])


def test_beyond_a_clips_window_there_are_zeros():
    mel = log_mel(clips((16_000, 32_000)), n_mels=80, window="clip")
    frames = mel.frames_B[0]
    assert (mel.mel_BMF[0, :, frames:] == 0).all()
    assert (mel.mel_BMF[0, :, :frames] != 0).any(dim=0).all()


@pytest.mark.parametrize(
    ("n_samples", "frames"),
    [
        (0, 16),
        (1, 18),
        (320, 18),
        (321, 20),
        (16_000, 116),
        (477_440, 3000),
        (477_441, 3000),
        (480_000, 3000),
    ],
)
def test_a_clips_window_is_its_duration_and_a_little_silence(n_samples, frames):
    assert clip_frames(n_samples) == frames
    mel = log_mel([np.zeros(n_samples, np.float32)], n_mels=80, window="clip")
    assert mel.frames_B.tolist() == [frames]
    assert mel.mel_BMF.shape == (1, 80, frames)


def test_silence_after_speech_is_the_maximum_less_two():
    clip = clips((16_000,))[0]
    mel = log_mel([clip], n_mels=80, window="clip").mel_BMF[0]
    assert torch.equal(mel[:, -1], (mel.max() - 2).expand(80))


def test_padded_tensors_count_each_clips_own_frames_alone():
    """A tensor from elsewhere may hold sound beyond a clip's frames: it must not set the clip's maximum."""
    quiet, loud = np.float32(0.001) * clips((32_000,))[0], clips((32_000,))[0]
    samples_BN = torch.from_numpy(np.concatenate([quiet, loud]))[None]
    frames_B = torch.tensor([150])
    joined = log_mel_of_padded(samples_BN, frames_B, n_mels=80)
    apart = log_mel_of_padded(samples_BN[:, :32_000], frames_B, n_mels=80)
    assert joined.shape[-1] == samples_BN.shape[1] // HOP
    assert torch.equal(joined[..., :150], apart[..., :150])
    assert (joined[..., 150:] == 0).all()


def test_tensors_and_read_only_and_double_arrays_are_taken():
    clip = clips((16_000,))[0]
    frozen = clip.copy()
    frozen.flags.writeable = False
    mel = log_mel([clip, frozen, torch.from_numpy(clip), clip.astype(np.float64)], n_mels=80).mel_BMF
    assert mel.dtype == torch.float32
    assert all(torch.equal(mel[0], other) for other in mel[1:])


def test_autocast_does_not_touch_the_spectrogram():
    plain = log_mel(clips((16_000,)), n_mels=80).mel_BMF
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(log_mel(clips((16_000,)), n_mels=80).mel_BMF, plain)


def test_tables_made_in_inference_mode_serve_training():
    from whisfusion import mel

    mel._filters.cache_clear()
    mel._hann.cache_clear()
    with torch.inference_mode():
        log_mel(clips((16_000,)), n_mels=80)
    samples_BN = torch.zeros(1, 16_000, requires_grad=True)
    mel.log_mel_of_padded(samples_BN, torch.tensor([100]), n_mels=80).sum().backward()
    assert samples_BN.grad is not None


@pytest.mark.parametrize(
    ("samples", "options", "sentence"),
    [
        ([], {}, "no clips"),
        ([np.zeros(480_001)], {}, "clip 0 has 480001 samples; cut it into windows"),
        ([np.zeros(16_000), np.zeros((2, 16_000))], {}, r"clip 1 has shape \(2, 16000\)"),
        ([np.zeros(16_000)], {"n_mels": 64}, "n_mels must be 80 or 128, not 64"),
        ([np.zeros(16_000)], {"window": "own"}, "window must be"),
    ],
)
def test_what_cannot_be_done_is_said(samples, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        log_mel(samples, **{"n_mels": 80} | options)
