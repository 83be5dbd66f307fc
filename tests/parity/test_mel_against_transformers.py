"""Our log-mel against Hugging Face's WhisperFeatureExtractor."""

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from whisfusion.mel import log_mel

# Largest difference of any value of the spectrogram; its values span about -1.5 to 1.5.
TORCH_PATH = 1e-5
NUMPY_PATH = 2e-4  # The extractor's numpy path computes in float64; float32 shows in the quietest bins of a chirp.


def signals() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    time = np.arange(30 * 16_000) / 16_000
    chirp = 0.5 * np.sin(2 * np.pi * (50 * time + 130 * time**2))
    clips = {
        "noise of 30 s": rng.normal(0, 0.1, 480_000),
        "quiet noise of 3 s": rng.normal(0, 1e-4, 48_000),
        "chirp over the whole band": chirp,
        "chirp that stops": chirp[: 7 * 16_000 + 123],
        "noise in bursts": rng.normal(0, 0.3, 160_000) * (np.arange(160_000) // 8_000 % 2),
        "digital silence": np.zeros(16_000),
        "one sample": np.ones(1),
        "a tenth of a second": rng.uniform(-1, 1, 1_600),
    }
    return {name: clip.astype(np.float32) for name, clip in clips.items()}


@pytest.mark.parametrize("n_mels", [80, 128])
def test_batch_matches_the_extractor(n_mels: int):
    clips = signals()
    extractor = WhisperFeatureExtractor(feature_size=n_mels)
    expected = extractor(list(clips.values()), sampling_rate=16_000, return_tensors="np").input_features
    mel = log_mel(list(clips.values()), n_mels=n_mels)
    assert mel.mel_BMF.shape == expected.shape == (len(clips), n_mels, 3000)
    for name, ours, theirs in zip(clips, mel.mel_BMF.numpy(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TORCH_PATH, err_msg=name)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_batch_matches_the_extractor_in_double_precision(n_mels: int):
    clips = signals()
    padded = np.stack([np.pad(clip, (0, 480_000 - len(clip))) for clip in clips.values()])
    expected = WhisperFeatureExtractor(feature_size=n_mels)._np_extract_fbank_features(padded, "cpu")
    mel = log_mel(list(clips.values()), n_mels=n_mels)
    for name, ours, theirs in zip(clips, mel.mel_BMF.numpy(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=NUMPY_PATH, err_msg=name)
