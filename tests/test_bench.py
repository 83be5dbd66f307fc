"""The set that speed is measured on, and the measuring itself on a toy."""

import json
import random
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from whisfusion.cli import main
from whisfusion.data.utterance import Utterance
from whisfusion.errors import OptionError
from whisfusion.evaluate import speed_set
from whisfusion.evaluate.speed import Marks, Row, Stage, breakdown, random_subject, stage_flops
from whisfusion.evaluate.speed_set import choose, made_up, misheard
from whisfusion.normalise import edit_rate
from whisfusion.pdd import PDDOptions

KEYS = ["model", "engine", "batch", "k", "n", "canvas", "window_s", "rerank", "ms", "rtfx", "device"]


def utterances(seconds: list[float]) -> list[Utterance]:
    return [Utterance(f"u{i}", f"{i}.wav", duration, f"words {i}", "en") for i, duration in enumerate(seconds)]


def seconds_of(chosen: list[speed_set.Pieces]) -> list[float]:
    return [sum(piece.duration for piece in pieces) for pieces in chosen]


@pytest.mark.parametrize("longest", [29.9, 16.0, 4.0])
def test_bins_are_full_and_the_mean_is_stated(longest):
    rng = random.Random(1)
    chosen = choose(utterances([rng.uniform(0.6, longest) for _ in range(900)]))
    durations = seconds_of(chosen)
    assert [sum(5 * i <= d < 5 * i + 5 for d in durations) for i in range(6)] == [56] * 6
    assert sum(durations) / 336 == pytest.approx(14.7, abs=0.1)
    assert any(len(pieces) > 1 for pieces in chosen) == (longest < 29)


def test_a_set_that_cannot_be_built_is_told():
    with pytest.raises(OptionError, match="no utterance"):
        choose(utterances([31.0, 0.1]))
    with pytest.raises(OptionError, match="0 to 5 s"):
        choose(utterances([12.0] * 100))


def test_made_up_clips_have_the_same_durations():
    clips = made_up()
    assert len(clips) == 336
    assert sum(clip.seconds for clip in clips) / 336 == pytest.approx(14.7, abs=0.01)
    assert [sum(5 * i <= clip.seconds < 5 * i + 5 for clip in clips) for i in range(6)] == [56] * 6
    assert len(clips[-1].text.split()) == round(clips[-1].seconds * 2.7)


def test_misheard_texts_have_a_tenth_of_errors():
    rng = random.Random(2)
    text = " ".join(f"w{i}" for i in range(3000))
    assert edit_rate(misheard(text, rng), text, "de") == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_toy_is_measured(engine):
    subject = random_subject("tiny", torch.device("cpu"), torch.float32)
    stage = Stage(subject, engine, made_up(per_bin=1)[:3], capture=False)
    heard = []
    select = stage._system._select
    stage._system._select = lambda *rest: heard.extend(select(*rest)) or heard[-len(rest[0]) :]
    for batch, rerank in ((1, False), (2, True)):
        outside, inside = stage.measure(batch=batch, pdd=PDDOptions(candidates=2, steps=2), rerank=rerank)
        assert [field.name for field in fields(Row)] == list(outside.to_dict()) == KEYS
        assert (outside.batch, outside.k, outside.n, outside.rerank) == (batch, 2, 2, rerank)
        assert (outside.canvas, outside.window_s, outside.engine) == (32, 30, engine)
        assert 0 < outside.ms < 10_000
        assert outside.rtfx * outside.ms == pytest.approx(1000 * sum(c.seconds for c in stage.clips) / 3, rel=0.01)
        assert inside.ms > 0
    texts = {candidate.text for one in heard for candidate in one.candidates}
    assert all(any(edit_rate(text, clip.text, "en") < 0.6 for clip in stage.clips) for text in texts)


def test_a_stage_that_is_met_again_counts_once():
    marks = Marks(torch.device("cpu"))
    for stage in ("start", "start", "encode", "step", "head", "step", "head", "step", "head"):
        marks(stage)
    assert list(marks.milliseconds()) == ["encode", "step", "head"]
    assert min(marks.milliseconds().values()) >= 0
    marks("start")
    assert not marks.milliseconds()


def test_stages_add_up():
    subject = random_subject("tiny", torch.device("cpu"), torch.float32)
    windows = Stage(subject, "eager", made_up(per_bin=1)).batches(1)[0]
    rows = breakdown(subject, windows, PDDOptions(candidates=2, steps=2), rerank=True, peak=1e12, runs=1)
    names = ["mel", "encode", "memory", "step 1", "head 1", "step 2", "head 2", "rerank"]
    assert [row["stage"] for row in rows] == names
    assert all(row["ms"] > 0 for row in rows)
    assert all((row["of_matrix_peak"] or 0) > 0 for row in rows[1:])


def test_arithmetic_at_full_size():
    with torch.device("meta"):
        subject = random_subject("paper", torch.device("meta"), torch.bfloat16)
    work = stage_flops(subject, rows=1, frames=3000, positions=192, pdd=PDDOptions())
    # Encoder 2.27, audio keys and values 0.25, eleven decoder passes of 0.30: 5.8 TFLOP.
    assert work["encode"] == pytest.approx(2.27e12, rel=0.01)
    assert work["memory"] == pytest.approx(0.25e12, rel=0.02)
    assert work["step 1"] + work["head 1"] == pytest.approx(0.30e12, rel=0.01)
    assert sum(work.values()) - work["rerank"] == pytest.approx(5.8e12, rel=0.01)


def test_the_command(tmp_path: Path, capsys):
    out = tmp_path / "speed.json"
    words = ["bench", "--shape", "tiny", "--per_bin", "1", "-k", "1", "-n", "1", "--device", "cpu", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == json.loads(out.read_text("utf-8"))
    assert list(json.loads(printed[-1])["rows"][0]) == KEYS
    assert main(["bench", "--engines", "graph", "--device", "cpu", "--shape", "tiny"]) == 2
    assert "CUDA" in capsys.readouterr().err
