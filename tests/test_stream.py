from itertools import islice

import numpy as np
import pytest
import torch
from small_run import CLIPS

from whisfusion.data.augment import add_noise, at_speed
from whisfusion.data.epoch import SamplerOptions
from whisfusion.data.manifest import read_manifest
from whisfusion.data.sampler import Sampler
from whisfusion.data.stream import StreamFeeder, StreamOptions
from whisfusion.data.utterance import load_samples
from whisfusion.decoder import Canvas
from whisfusion.mel import log_mel
from whisfusion.tokenizer import get_tokenizer

MEL_TOLERANCE = 1e-5
CANVAS = Canvas("follow", 64)


def feeder_of(rank=0, world=1, micro_batches=1, window="clip", **sampler) -> StreamFeeder:
    utterances = read_manifest(CLIPS)
    margin = 0.16 if window == "clip" else 0.0
    options = SamplerOptions(**({"utterances": 8, "margin": margin} | sampler))
    tokens = np.array([len(get_tokenizer().encode(u.text)) for u in utterances])
    planned = Sampler(utterances, options, rank=rank, world=world, tokens_N=tokens, positions=CANVAS.positions)
    stream = StreamOptions(
        mels=80, window=window, canvas=CANVAS, text_style="normalised", micro_batches=micro_batches, workers=2
    )
    return StreamFeeder(utterances, planned, stream)


@pytest.fixture
def feeder():
    made = feeder_of()
    yield made
    made.close()


def test_rows_are_clips_with_their_texts(feeder):
    clips = {u.id: u for u in read_manifest(CLIPS)}
    [batch] = next(iter(feeder))
    for row, name in enumerate(batch.ids):
        alone = log_mel([load_samples(clips[name])[: int(clips[name].duration * 16_000)]], n_mels=80, window="clip")
        frames = int(batch.frames_B[row])
        assert frames == int(alone.frames_B[0])
        assert torch.allclose(batch.mel_BMF[row, :, :frames], alone.mel_BMF[0], atol=MEL_TOLERANCE)
        assert not batch.mel_BMF[row, :, frames:].any()
        assert get_tokenizer().decode(batch.targets.tokens_BL[row, 4:]) == clips[name].text
        assert int(batch.targets.canvas_BL[row].sum()) == CANVAS.positions(clips[name].duration)
    assert batch.seconds == pytest.approx(sum(clips[name].duration for name in batch.ids), abs=1e-3)


def test_padded_windows_are_whispers():
    made = feeder_of(window="padded")
    [batch] = next(iter(made))
    made.close()
    assert batch.mel_BMF.shape == (8, 80, 3000)
    assert (batch.frames_B == 3000).all()


def test_it_goes_on_at_its_place(feeder):
    ids = [step[0].ids for step in islice(feeder, 12)]
    other = feeder_of()
    for _ in islice(other, 5):
        pass
    place = other.state_dict()
    other.close()
    third = feeder_of()
    third.load_state_dict(place)
    assert [step[0].ids for step in islice(third, 7)] == ids[5:]
    third.close()


def test_ranks_and_micro_batches_share_out_the_same_step(feeder):
    [whole] = next(iter(feeder))
    seen = {}
    for rank in range(2):
        part = feeder_of(rank=rank, world=2, micro_batches=2)
        for batch in next(iter(part)):
            assert batch.mel_BMF.shape == (2, *whole.mel_BMF.shape[1:])
            assert batch.targets.tokens_BL.shape == (2, whole.targets.tokens_BL.shape[1])
            seen |= dict(zip(batch.rows_B.tolist(), batch.ids, strict=True))
        part.close()
    assert seen == dict(zip(whole.rows_B.tolist(), whole.ids, strict=True))


def test_joined_and_sped_up_clips_fit():
    made = feeder_of(join=0.5, join_seconds=6.0, speeds=(0.9, 1.1))
    names = set()
    for [batch] in islice(made, 9):
        names |= set(batch.ids)
        assert int(batch.frames_B.max()) <= batch.mel_BMF.shape[2]
        assert (batch.targets.counts_B > 1).all()
    assert made.failures() == []
    made.close()
    assert any("+" in name for name in names)


def test_speed_changes_length_and_pitch():
    tone = np.sin(2 * np.pi * 400 * np.arange(16_000) / 16_000).astype(np.float32)
    faster = at_speed(tone, 1.1)
    assert len(faster) == round(16_000 / 1.1)
    spectrum = np.abs(np.fft.rfft(faster[2000:10_000]))
    assert np.argmax(spectrum) * 16_000 / 8_000 == pytest.approx(440, abs=2)


def test_noise_lies_10_to_40_decibel_below_the_speech():
    rng = np.random.default_rng(0)
    tone = np.sin(np.arange(16_000) / 7).astype(np.float32)
    levels = []
    for _ in range(50):
        noise = add_noise(tone, rng=rng) - tone
        levels.append(10 * np.log10(np.mean(tone**2) / np.mean(noise**2)))
    assert 9.5 < min(levels) < 15
    assert 35 < max(levels) < 40.5
