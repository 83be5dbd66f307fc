"""The bank hears what decoding hears, and its steps are what the sampler planned, on any rank and after any stop."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import soundfile
import torch

from whisfusion.data.bank import SPEEDS, bank_bytes, build_bank
from whisfusion.data.bank_feeder import BankFeeder
from whisfusion.data.batch import label_ids, make_targets
from whisfusion.data.epoch import SamplerOptions
from whisfusion.data.utterance import Utterance
from whisfusion.decoder import Canvas
from whisfusion.errors import OptionError
from whisfusion.mel import log_mel

MELS = 80
# Values lie below 2, where float16 has steps of 2**-10.
BANK_ROUNDING = 2**-11
# Rounding, and rounding errors of a spectrum that was computed in another batch.
JOINED_TOLERANCE = 2 * BANK_ROUNDING
CANVAS = Canvas("follow", 224)
OPTIONS = SamplerOptions(
    seconds=32, shapes=(3.0, 5.0, 8.0), rows_multiple=2, join=0.5, join_seconds=6.5, speeds=SPEEDS, seed=7
)
WORDS = ("rain", "falls", "softly", "over", "green", "hills")


def voice(seconds, *, seed, loudness=0.3):
    """Noise that comes and goes, so that frames differ."""
    rng = np.random.default_rng(seed)
    count = round(seconds * 16_000)
    return (loudness * rng.normal(0, 0.3, count) * np.sin(np.arange(count) / 2_000) ** 2).astype(np.float32)


def corpus(folder, clips, languages=("en",)):
    """Write clips as float WAV and return their utterances."""
    utterances = []
    for number, samples in enumerate(clips):
        soundfile.write(folder / f"{number}.wav", samples, 16_000, subtype="FLOAT")
        words = " ".join(WORDS[(number + i) % len(WORDS)] for i in range(1 + number % 2))
        language = languages[number % len(languages)]
        utterances.append(
            Utterance(f"clip{number}", f"{number}.wav", len(samples) / 16_000, words, language, "", "set", root=folder)
        )
    return utterances


@pytest.fixture(scope="module")
def clips():
    seconds = np.random.default_rng(5).uniform(1.0, 6.5, 60)
    return [voice(s, seed=i, loudness=10.0 ** -(i % 3)) for i, s in enumerate(seconds)]


@pytest.fixture(scope="module")
def utterances(tmp_path_factory, clips):
    return corpus(tmp_path_factory.mktemp("speech"), clips, languages=("en", "de"))


@pytest.fixture(scope="module")
def bank(utterances):
    return build_bank(utterances, n_mels=MELS)


@pytest.fixture
def feeder(bank):
    made = []

    def make(options=OPTIONS, **more):
        made.append(BankFeeder(bank, options, **{"canvas": CANVAS, "text_style": "normalised"} | more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def frames_of(bank, clip, speed=1.0):
    row = bank.speeds.index(speed)
    first, count = bank.firsts_VC[row, clip], bank.counts_VC[row, clip]
    return bank.frames_NM[first : first + count].float().T


def test_a_clip_in_the_bank_is_what_decoding_hears(bank, clips):
    for number, samples in enumerate(clips):
        alone = log_mel([samples], n_mels=MELS, window="clip").mel_BMF[0]
        kept = frames_of(bank, number)
        assert kept.shape == alone.shape
        torch.testing.assert_close(kept, alone, rtol=0, atol=BANK_ROUNDING)


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_another_speed_is_what_decoding_would_hear_of_it(bank, clips, speed):
    soxr = pytest.importorskip("soxr")
    for number in (0, 1, 2):
        changed = soxr.resample(clips[number], 16_000 * speed, 16_000, quality="VHQ")
        expected = log_mel([changed], n_mels=MELS, window="clip").mel_BMF[0]
        kept = frames_of(bank, number, speed)
        assert kept.shape == expected.shape
        # The upper bins lie where filters fade out, each in its own way; see test_speed.py for the tolerance.
        difference = (kept - expected)[:70].abs()
        assert difference.mean() < BANK_ROUNDING
        assert difference.quantile(0.999) < 20 * BANK_ROUNDING


def test_single_clips_come_out_of_a_step_as_decoding_hears_them(feeder, utterances, clips):
    samples = {u.id: clip for u, clip in zip(utterances, clips, strict=True)}
    feed = feeder(replace(OPTIONS, join=0.0, speeds=(1.0,)))
    for step in islice(feed, 4):
        (batch,) = step
        alone = log_mel([samples[name] for name in batch.ids], n_mels=MELS, window="clip")
        assert torch.equal(batch.frames_B, alone.frames_B)
        width = alone.mel_BMF.shape[-1]
        torch.testing.assert_close(batch.mel_BMF[..., :width].float(), alone.mel_BMF, rtol=0, atol=BANK_ROUNDING)
        assert not batch.mel_BMF[..., width:].any()


def test_joined_clips_are_what_decoding_hears_of_the_joined_sound(tmp_path):
    # Whole pairs of frames, so that frames of the joined sound fall where those of its clips do.
    clips = [voice(1.6, seed=0, loudness=1.0), voice(1.2, seed=1, loudness=1e-3)]
    bank = build_bank(corpus(tmp_path, clips), n_mels=MELS, speeds=(1.0,))
    options = replace(OPTIONS, speeds=(1.0,), join=1.0, join_most=2, seconds=16)
    feed = BankFeeder(bank, options, canvas=CANVAS, text_style="normalised")
    (batch,) = next(iter(feed))
    feed.close()
    row = next(i for i, name in enumerate(batch.ids) if "+" in name)
    order = [int(name.removeprefix("clip")) for name in batch.ids[row].split("+")]
    joined = log_mel([np.concatenate([clips[i] for i in order])], n_mels=MELS, window="clip")
    frames = int(joined.frames_B[0])
    assert batch.frames_B[row] == frames
    seam = len(clips[order[0]]) // 160
    far = [f for f in range(frames) if abs(f - seam) > 2]
    torch.testing.assert_close(
        batch.mel_BMF[row, :, far].float(), joined.mel_BMF[0, :, far], rtol=0, atol=JOINED_TOLERANCE
    )
    # Without the common maximum's floor the quiet clip would reach far lower.
    assert batch.mel_BMF[row, :, :frames].float().min() >= joined.mel_BMF.max() - 2 - JOINED_TOLERANCE


def test_targets_are_those_of_the_text(feeder, bank):
    by_id = {u.id: u for u in bank.utterances}
    joined = 0
    for step in islice(feeder(), 12):
        (batch,) = step
        rows = [[by_id[name] for name in names.split("+")] for names in batch.ids]
        joined += sum(len(row) > 1 for row in rows)
        assert all(len({u.language for u in row}) == 1 for row in rows)
        labels = [label_ids(" ".join(u.text for u in row), row[0].language, "normalised") for row in rows]
        positions = batch.targets.tokens_BL.shape[1]
        canvases = batch.targets.canvas_BL.sum(1).tolist()
        expected = make_targets(labels, [row[0].language for row in rows], canvases, positions)
        for name in ("tokens_BL", "canvas_BL", "scored_BL", "counts_B"):
            got, wanted = getattr(batch.targets, name), getattr(expected, name)
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted), name
    assert joined


def test_the_canvas_follows_the_duration_as_in_decoding(feeder, bank):
    by_id = {u.id: u for u in bank.utterances}
    for step in islice(feeder(replace(OPTIONS, speeds=(1.0,))), 6):
        (batch,) = step
        seconds = [sum(by_id[name].duration for name in names.split("+")) for names in batch.ids]
        assert batch.targets.canvas_BL.sum(1).tolist() == [CANVAS.positions(s) for s in seconds]
        assert batch.seconds == pytest.approx(sum(seconds))


def test_shapes_are_few_and_full(feeder):
    feed = feeder()
    shapes = {
        (*batch.mel_BMF.shape, *batch.targets.tokens_BL.shape, batch.total_rows)
        for (batch,) in islice(feed, 3 * feed.sampler.steps_per_epoch())
    }
    assert shapes == {
        (rows, MELS, 100 * seconds, rows, CANVAS.positions(seconds), rows)
        for rows, seconds in ((10, 3), (6, 5), (4, 8))
    }


def test_steps_are_the_samplers_with_nothing_cut_off(feeder, bank):
    feed = feeder()
    planned = feed.sampler.steps_from()
    for (batch,), drawn in islice(zip(feed, planned, strict=False), 2 * feed.sampler.steps_per_epoch() + 2):
        assert batch.ids == tuple("+".join(bank.utterances[clip].id for clip in draw.clips) for draw in drawn.draws)
        tail = 16
        frames = [
            sum(int(bank.counts_VC[bank.speeds.index(draw.speed), clip]) - tail for clip in draw.clips) + tail
            for draw in drawn.draws
        ]
        assert batch.frames_B.tolist() == frames


def test_frames_are_even_and_zero_beyond_each_clip(feeder):
    for (batch,) in islice(feeder(), 10):
        assert (batch.frames_B % 2 == 0).all()
        beyond_BF = torch.arange(batch.mel_BMF.shape[2]) >= batch.frames_B[:, None]
        assert not batch.mel_BMF.transpose(1, 2)[beyond_BF].any()
        assert batch.mel_BMF.transpose(1, 2)[~beyond_BF].any(-1).all()


def same(first, second):
    assert first.ids == second.ids
    assert torch.equal(first.mel_BMF, second.mel_BMF)
    assert torch.equal(first.targets.tokens_BL, second.targets.tokens_BL)


def test_resuming_goes_on_at_the_exact_place_across_epochs(feeder):
    whole = feeder()
    count = whole.sampler.steps_per_epoch() + 3
    steps = list(islice(whole, count + 4))
    stopped = feeder()
    iterator = iter(stopped)
    for _ in range(count):
        next(iterator)
    resumed = feeder()
    resumed.load_state_dict(stopped.state_dict())
    for (expected,), (got,) in zip(steps[count:], islice(resumed, 4), strict=True):
        same(expected, got)
    # Another seed must not have the same steps, or the above shows nothing.
    (other,) = next(iter(feeder(replace(OPTIONS, seed=8))))
    assert other.ids != steps[0][0].ids


def test_a_place_in_other_data_is_refused(feeder):
    with pytest.raises(OptionError, match="not those of the checkpoint"):
        feeder().load_state_dict(feeder(replace(OPTIONS, seed=8)).state_dict())


def test_ranks_and_micro_batches_divide_a_step(feeder):
    whole = feeder(replace(OPTIONS, rows_multiple=4))
    parts = [feeder(replace(OPTIONS, rows_multiple=4), rank=rank, world=2, micro_batches=2) for rank in (0, 1)]
    for (batch,), *steps in zip(islice(whole, 5), *parts, strict=False):
        seen = [part for step in steps for part in step]
        rows_B = torch.cat([part.rows_B for part in seen])
        assert sorted(rows_B.tolist()) == list(range(batch.total_rows))
        assert {part.total_rows for part in seen} == {batch.total_rows}
        assert len({part.mel_BMF.shape for part in seen}) == 1
        assert torch.equal(torch.cat([part.mel_BMF for part in seen]), batch.mel_BMF[rows_B])
        names = [name for part in seen for name in part.ids]
        assert names == [batch.ids[row] for row in rows_B.tolist()]


def test_processes_decode_the_same_bank(utterances, bank):
    other = build_bank(utterances[:4], n_mels=MELS, speeds=(1.0,), workers=1)
    for clip in range(4):
        torch.testing.assert_close(frames_of(other, clip), frames_of(bank, clip), rtol=0, atol=BANK_ROUNDING)


def test_what_cannot_be_heard_is_left_out_and_named(tmp_path):
    utterances = corpus(tmp_path, [voice(1.5, seed=0), voice(31, seed=1), voice(1.2, seed=2), voice(2, seed=3)])
    (tmp_path / "0.wav").write_bytes(b"RIFF, but no more")
    utterances[2] = replace(utterances[2], text="word " * 60)
    bank = build_bank(utterances, n_mels=MELS, speeds=(1.0,))
    assert [u.id for u in bank.utterances] == ["clip2", "clip3"]
    feed = BankFeeder(bank, replace(OPTIONS, speeds=(1.0,)), canvas=CANVAS, text_style="normalised")
    reasons = dict(feed.failures())
    assert set(reasons) == {"clip0", "clip1", "clip2"}
    assert "0.wav" in reasons["clip0"]
    assert "31.0 s" in reasons["clip1"]
    assert "60 tokens in 1.20 s" in reasons["clip2"]
    assert feed.failures() == []
    assert set(next(iter(feed))[0].ids) <= {"clip3", "clip3+clip3"}
    feed.close()


def test_a_manifest_may_be_wrong_about_durations(tmp_path):
    clips = [voice(2.0 + i / 4, seed=i) for i in range(4)]
    told = [replace(u, duration=0.5) for u in corpus(tmp_path, clips)]
    bank = build_bank(told, n_mels=MELS, speeds=(1.0,))
    assert [u.duration for u in bank.utterances] == [len(clip) / 16_000 for clip in clips]
    for number, samples in enumerate(clips):
        alone = log_mel([samples], n_mels=MELS, window="clip").mel_BMF[0]
        torch.testing.assert_close(frames_of(bank, number), alone, rtol=0, atol=BANK_ROUNDING)


def test_a_clip_too_long_at_a_slow_speed_is_kept_at_the_others(tmp_path):
    bank = build_bank(corpus(tmp_path, [voice(28, seed=0), voice(1, seed=1)]), n_mels=MELS)
    assert (bank.counts_VC[:, 0] > 0).tolist() == [False, True, True]
    feed = BankFeeder(bank, replace(OPTIONS, shapes=(30.0,), seconds=60), canvas=CANVAS, text_style="normalised")
    assert all(batch.frames_B.max() > 2_500 for (batch,) in islice(feed, 4))
    feed.close()


def test_memory_is_known_beforehand(utterances, bank):
    assert bank_bytes(utterances, n_mels=MELS) == bank.frames_NM.numel() * bank.frames_NM.element_size()


def test_progress_is_told(utterances):
    told = []
    build_bank(utterances[:5], n_mels=MELS, speeds=(1.0,), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (5, 5)


def test_options_that_do_not_fit_are_all_named(bank):
    with pytest.raises(OptionError, match=r"lacks the speeds \[1\.3\].*; `rows_multiple` of 2 does not divide into 4"):
        BankFeeder(bank, replace(OPTIONS, speeds=(1.0, 1.3)), canvas=CANVAS, text_style="normalised", micro_batches=4)
