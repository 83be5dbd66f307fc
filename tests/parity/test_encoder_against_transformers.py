"""Our encoder against Hugging Face's, at random weights that went through a saved folder."""

from pathlib import Path

import pytest
import torch
from random_whisper import random_whisper

from whisfusion.weights import load_whisper

FLOAT32 = 2e-5  # features have unit size after the last norm


@pytest.mark.parametrize("mels", [80, 128])
def test_features(tmp_path: Path, mels: int):
    theirs = random_whisper(num_mel_bins=mels)
    theirs.save_pretrained(tmp_path)
    ours = load_whisper(tmp_path)
    mel_BMF = torch.randn(3, mels, 200, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected_BTD = theirs.model.encoder(mel_BMF).last_hidden_state
    assert expected_BTD.std() > 0.5
    torch.testing.assert_close(ours.encoder(mel_BMF), expected_BTD, rtol=0, atol=FLOAT32)


def test_a_clip_in_a_batch_has_the_features_of_a_short_window(tmp_path: Path):
    """Hugging Face knows no clip-length windows, but a model whose window is that short."""
    theirs = random_whisper()
    theirs.save_pretrained(tmp_path)
    ours = load_whisper(tmp_path)
    mel_BMF = torch.randn(2, 80, 200, generator=torch.Generator().manual_seed(2))
    mel_BMF[1, :, 84:] = 0.0
    short = random_whisper(max_source_positions=42)
    state = theirs.state_dict()
    positions = "model.encoder.embed_positions.weight"
    short.load_state_dict(state | {positions: state[positions][:42]})
    features_BTD = ours.encoder(mel_BMF, torch.tensor([200, 84]))
    with torch.no_grad():
        expected_BTD = short.model.encoder(mel_BMF[1:, :, :84]).last_hidden_state
    torch.testing.assert_close(features_BTD[1:, :42], expected_BTD, rtol=0, atol=FLOAT32)
    assert not features_BTD[1, 42:].any()
