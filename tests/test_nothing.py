"""Clips in which nobody speaks, and an empty text on its whole way to the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_run import small_recipe

from whisfusion.cli import main
from whisfusion.data.bank import build_bank
from whisfusion.data.bank_feeder import BankFeeder
from whisfusion.data.batch import Batch, label_ids, make_targets
from whisfusion.data.check import check_data
from whisfusion.data.epoch import SamplerOptions
from whisfusion.data.filters import FilterOptions, filter_utterances
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.data.nothing import SOUNDS, NothingOptions, make_nothing, make_sound
from whisfusion.data.sampler import Sampler
from whisfusion.data.stream import StreamFeeder, StreamOptions
from whisfusion.decoder import Canvas
from whisfusion.errors import OptionError
from whisfusion.tokenizer import ENDOFTEXT, MASK, PAPER_LANGUAGES, PROMPT_LENGTH, get_tokenizer
from whisfusion.train.model import starting_point
from whisfusion.train.parallel import Ranks
from whisfusion.train.trainer import Trainer

CANVAS = Canvas("follow", 64)
SMALL = NothingOptions(hours=0.04, workers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("nothing")
    make_nothing(made, SMALL)
    return made


@pytest.mark.parametrize("kind", SOUNDS)
def test_every_sound_is_one(kind):
    for seed in range(5):
        samples = SOUNDS[kind](16_000 + 1000 * seed, np.random.default_rng(seed))
        assert samples.shape == (16_000 + 1000 * seed,)
        assert np.isfinite(samples).all()
        assert samples.any() == (kind != "silence")


def test_levels():
    peaks = []
    for seed in range(60):
        kind, samples = make_sound(4_000, rng=np.random.default_rng(seed))
        assert samples.dtype == np.float32
        peaks += [20 * np.log10(np.abs(samples).max())] if kind != "silence" else []
    assert -60.1 < min(peaks) < -50
    assert -10 < max(peaks) < -2.9


def test_what_is_written(folder):
    utterances = read_manifest(folder)
    assert sum(u.duration for u in utterances) >= 144 > sum(u.duration for u in utterances[:-1])
    assert {u.text for u in utterances} == {""}
    assert {u.language for u in utterances} == set(PAPER_LANGUAGES)
    assert {u.speaker for u in utterances} <= set(SOUNDS)
    assert all(1 <= u.duration <= 20 for u in utterances)
    for utterance in utterances:
        assert len(load_samples(utterance)) == pytest.approx(utterance.duration * 16_000, abs=16)


def test_the_seed_decides_and_the_number_of_processes_does_not(folder, tmp_path):
    for name, seed, workers in (("two", 42, 2), ("other", 43, 1)):
        make_nothing(tmp_path / name, replace(SMALL, seed=seed, workers=workers))

    def content(where):
        return [file.read_bytes() for file in sorted(where.iterdir())]

    assert content(tmp_path / "two") == content(folder)
    assert content(tmp_path / "other") != content(folder)


def test_the_command(tmp_path, capfd):
    words = ["data", "nothing", "--hours", "0.003", "--workers", "1", "--language", "German"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "nothing.jsonl: " in capfd.readouterr().out
    assert {u.language for u in read_manifest(tmp_path)} == {"de"}
    with pytest.raises(OptionError) as caught:
        NothingOptions(hours=0, languages=("xx",), coding="mp3", seed=-1)
    for word in ("'xx'", "`hours`", "`coding`", "`seed`"):
        assert word in str(caught.value)


def test_an_empty_text_is_meant_and_a_text_that_becomes_empty_is_not(folder):
    meant = read_manifest(folder)
    report = check_data([folder])
    assert report.ok
    assert {f.kind: f.count for f in report.findings} == {"nothing-said": len(meant)}
    for style in ("normalised", "written"):
        assert label_ids("", "en", style) == []
        left_over = [replace(meant[0], text=text) for text in (" ", "[music]", "(laughs)")]
        options = FilterOptions(text_style=style)
        filtered = filter_utterances([*meant, *left_over], options, positions=CANVAS.positions)
        # What is written stays as it is: brackets are text there.
        lost = 3 if style == "normalised" else 1
        assert filtered.kept == [*meant, *left_over[lost:]]
        assert filtered.dropped == {"no text": lost}
        assert not filtered.tokens[: len(meant)].any()


def streamed(utterances, options):
    tokens = np.array([len(label_ids(u.text, u.language, "written")) for u in utterances])
    planned = Sampler(utterances, options, tokens_N=tokens, positions=CANVAS.positions)
    stream = StreamOptions(mels=80, window="clip", canvas=CANVAS, text_style="written", workers=1)
    return StreamFeeder(utterances, planned, stream)


def banked(utterances, options):
    bank = build_bank(utterances, n_mels=80, speeds=(1.0,))
    return BankFeeder(bank, options, canvas=CANVAS, text_style="written")


@pytest.mark.parametrize("make", [streamed, banked])
def test_feeders_join_clips_with_and_without_words(folder, make):
    words = {0: "Some words.", 3: "And more."}
    short = sorted(read_manifest(folder), key=lambda u: u.duration)[:16]
    utterances = [
        replace(u, id=str(i), language="en", text=words.get(i % 8, ""), dataset="d") for i, u in enumerate(short)
    ]
    options = SamplerOptions(
        utterances=16, shapes=(30.0,), join=0.7, join_seconds=25.0, join_most=3, margin=0.16, speeds=(1.0,), seed=3
    )
    feeder = make(utterances, options)
    try:
        [batch] = next(iter(feeder))
    finally:
        feeder.close()
    texts = {u.id: u.text for u in utterances}
    kinds = set()
    for name, tokens_L, scored_L, count in zip(
        batch.ids, batch.targets.tokens_BL, batch.targets.scored_BL, batch.targets.counts_B, strict=True
    ):
        said = [text for clip in name.split("+") if (text := texts[clip])]
        ids = get_tokenizer().encode(" ".join(said))
        end = PROMPT_LENGTH + len(ids)
        assert tokens_L[PROMPT_LENGTH : end + 1].tolist() == [*ids, ENDOFTEXT]
        assert scored_L.nonzero()[:, 0].tolist() == list(range(PROMPT_LENGTH, end + 1))
        assert count == len(ids) + 1
        kinds.add((bool(said), "+" in name, len(said) < len(name.split("+"))))
    # Joined clips of which some say nothing, and such that say nothing at all.
    assert (True, True, True) in kinds
    assert any(not spoken for spoken, *_ in kinds)


def batch_of(labels, frames=200):
    generator = torch.Generator().manual_seed(5)
    count = len(labels)
    return Batch(
        mel_BMF=torch.randn(count, 80, frames, generator=generator),
        frames_B=torch.full((count,), frames),
        targets=make_targets(labels, ["en"] * count, [20] * count, 20),
        rows_B=torch.arange(count),
        total_rows=count,
        seconds=1.0,
        ids=tuple(map(str, range(count))),
    )


def test_the_loss_of_an_empty_transcript():
    recipe = small_recipe(decoder__adapter="1", decoder__anchors="true", ctc_weight="1.0", quantity_weight="1.0")
    start = starting_point(recipe, None)
    trainer = Trainer(start.decoder, start.encoder, recipe, steps=10, ranks=Ranks(torch.device("cpu")))
    seen = {}

    def keep(_, args, terms):
        seen.update(masked=args[2], terms=terms)

    trainer.objective.register_forward_hook(keep)
    trainer.step((batch_of([[], []]),))
    masked, empty = seen["masked"], seen["terms"]
    # One endoftext each, and it is masked whatever the ratio.
    assert masked.targets_R.tolist() == [ENDOFTEXT] * 2
    assert masked.weights_R.tolist() == [1.0, 1.0]
    assert (masked.tokens_BL[:, PROMPT_LENGTH] == MASK).all()
    assert masked.counts_B.tolist() == [1.0, 1.0]
    assert masked.letter_counts_B.tolist() == [0, 0]
    assert masked.valid_B.all()
    assert all(torch.isfinite(term).all() for term in vars(empty).values())
    assert all(torch.isfinite(p).all() for p in trainer.decoder.parameters())
    # No more than a clip with words: each of its audio positions is one choice among 257.
    assert 0 < float(empty.ctc.detach()) / 2 < 3 * np.log(257)
    trainer.step((batch_of([[500, 600, 700], [800]]),))
    assert float(empty.ctc.detach()) < float(seen["terms"].ctc.detach())
