import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import whisfusion
from whisfusion.data.manifest import Utterance, read_manifest
from whisfusion.errors import LanguageError, ManifestError, OptionError
from whisfusion.evaluate.run import RunOptions, RunSummary, evaluate, facts_path
from whisfusion.evaluate.score import read_hypotheses, score
from whisfusion.transcriber import Transcriber

SECRET = "unmistakable reference text"


@pytest.fixture(scope="module")
def transcriber(tiny_clip_model: Path) -> Transcriber:
    return whisfusion.load(tiny_clip_model, device="cpu")


@pytest.fixture
def utterances(make_manifest: Callable[..., Path]) -> list[Utterance]:
    english = make_manifest("english", [0.5, 1.5, 1.0], text=SECRET)
    german = make_manifest("german", [0.7, 0.9], language="de", text=SECRET)
    return read_manifest(english, german)


def lines(out: Path) -> dict[str, dict]:
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len({record["id"] for record in records}) == len(records)
    return {record["id"]: record for record in records}


def texts(out: Path) -> dict[str, list[str]]:
    return {name: [c["text"] for c in record["candidates"]] for name, record in lines(out).items()}


def test_a_line_holds_all_that_was_heard_and_nothing_that_should_have_been(
    transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path
):
    out = tmp_path / "new" / "h.jsonl"
    summary = evaluate(transcriber, utterances, out, RunOptions({"candidates": 4, "batch_size": 2}))
    assert replace(summary, wall_seconds=0.0) == RunSummary(5, 0, 0, pytest.approx(4.6), 0.0)
    records = lines(out)
    assert set(records) == {u.id for u in utterances}
    for utterance in utterances:
        record = records[utterance.id]
        assert record["dataset"] == utterance.dataset
        assert record["language"] == utterance.language
        assert record["duration"] == utterance.duration
        assert len(record["candidates"]) == 4
        chosen = record["candidates"][record["index"]]
        assert chosen["text"] == record["text"]
        assert chosen["confidence"] == pytest.approx(record["confidence"])
        assert chosen["score"] == max(c["score"] for c in record["candidates"])
        assert set(record["timings"]) == {"mel", "encode", "decode", "select"}
    assert SECRET.split()[0] not in out.read_text("utf-8")


def test_what_is_written_is_what_transcribe_says(transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path):
    out = tmp_path / "h.jsonl"
    evaluate(transcriber, utterances, out, RunOptions({"seed": 5}))
    for utterance in utterances:
        alone = transcriber.transcribe(utterance.file, language=utterance.language, seed=5)
        assert lines(out)[utterance.id]["text"] == alone.text


def test_the_run_file_says_how_it_was_made(transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path):
    out = tmp_path / "h.jsonl"
    evaluate(transcriber, utterances, out, RunOptions({"candidates": 2}, facts={"model": "tiny"}))
    assert facts_path(out).name == "h.run.json"
    facts = json.loads(facts_path(out).read_text("utf-8"))
    assert facts["settings"]["decoding"] == {"candidates": 2}
    assert facts["settings"]["model_defaults"]["steps"] == 2
    assert facts["settings"]["model"] == "tiny"
    assert facts["versions"]["whisfusion"] == whisfusion.__version__
    assert facts["machine"]["device"] == "cpu"
    assert facts["summary"]["utterances"] == 5


def test_failures_are_recorded_and_counted(transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path):
    Path(utterances[1].file).write_bytes(b"no sound at all")
    Path(utterances[3].file).unlink()
    out = tmp_path / "h.jsonl"
    summary = evaluate(transcriber, utterances, out)
    assert summary.errors == 2
    records = lines(out)
    assert len(records) == 5
    for failed in (utterances[1], utterances[3]):
        assert records[failed.id]["text"] == ""
        assert failed.id in records[failed.id]["error"]
    assert "error" not in records[utterances[0].id]
    report = score(read_hypotheses(out), utterances)
    assert sum(s.errors for s in report.scores) == 2


def test_a_run_that_was_cut_off_is_resumed_and_failures_are_tried_again(
    transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path
):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "h.jsonl"
    evaluate(transcriber, utterances, whole)
    sound = Path(utterances[0].file).read_bytes()
    Path(utterances[0].file).write_bytes(b"")
    evaluate(transcriber, utterances[:4], out)
    Path(utterances[0].file).write_bytes(sound)
    finished = out.read_text("utf-8").splitlines(keepends=True)
    failures = sum("error" in json.loads(line) for line in finished[:3])
    assert failures == 1
    out.write_text("".join(finished[:3]) + finished[3][:40], "utf-8")
    summary = evaluate(transcriber, utterances, out, RunOptions(existing="resume"))
    assert (summary.utterances, summary.resumed, summary.errors) == (5, 2, 0)
    assert texts(out) == texts(whole)


def test_a_finished_run_resumes_to_itself(transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path):
    out = tmp_path / "h.jsonl"
    evaluate(transcriber, utterances, out)
    text = out.read_bytes()
    summary = evaluate(transcriber, utterances, out, RunOptions(existing="resume"))
    assert (summary.resumed, summary.audio_seconds) == (5, 0.0)
    assert out.read_bytes() == text


def test_an_output_is_never_replaced_unasked(transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path):
    out = tmp_path / "h.jsonl"
    out.write_text("precious\n")
    with pytest.raises(OptionError, match=r"h\.jsonl is there already: add --resume .* or --overwrite"):
        evaluate(transcriber, utterances, out)
    assert out.read_text() == "precious\n"
    evaluate(transcriber, utterances, out, RunOptions(existing="overwrite"))
    assert len(lines(out)) == 5


def test_a_run_is_not_resumed_with_other_options(transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path):
    out = tmp_path / "h.jsonl"
    evaluate(transcriber, utterances[:1], out, RunOptions({"seed": 1}))
    with pytest.raises(OptionError, match=r"another decoding \({'seed': 1}, now {'seed': 2}\)"):
        evaluate(transcriber, utterances, out, RunOptions({"seed": 2}, existing="resume"))
    facts_path(out).unlink()
    with pytest.raises(OptionError, match=r"h\.run\.json is missing"):
        evaluate(transcriber, utterances, out, RunOptions({"seed": 1}, existing="resume"))


def test_the_language_is_the_manifests_or_the_models(
    transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path
):
    evaluate(transcriber, utterances, tmp_path / "h.jsonl", RunOptions(detect_language=True))
    for utterance in utterances:
        record = lines(tmp_path / "h.jsonl")[utterance.id]
        assert record["language"] == utterance.language
        assert record["detected_language"] == transcriber.transcribe(utterance.file).language


def test_what_cannot_be_done_is_refused_before_any_work(
    transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path
):
    out = tmp_path / "h.jsonl"
    with pytest.raises(LanguageError, match="'fr'"):
        evaluate(transcriber, [*utterances, replace(utterances[0], id="x", language="fr")], out)
    with pytest.raises(ManifestError, match="two utterances of english are called english-0"):
        evaluate(transcriber, [utterances[0], utterances[0]], out)
    assert not out.exists()


def test_long_audio_has_no_candidates_of_its_own(transcriber: Transcriber, make_manifest, tmp_path: Path):
    utterances = read_manifest(make_manifest("long", [31.0]))
    evaluate(transcriber, utterances, tmp_path / "h.jsonl", RunOptions({"candidates": 2}))
    record = lines(tmp_path / "h.jsonl")["long-0"]
    assert "candidates" not in record
    assert score(read_hypotheses(tmp_path / "h.jsonl"), utterances).scores[0].oracle is None


def test_progress_ends_at_all_the_audio(transcriber: Transcriber, utterances: list[Utterance], tmp_path: Path):
    told: list[float] = []
    evaluate(transcriber, utterances, tmp_path / "h.jsonl", RunOptions({"batch_size": 1}), on_progress=told.append)
    assert len(told) == 5
    assert np.all(np.diff(told) > 0)
    assert told[-1] == pytest.approx(sum(u.duration for u in utterances))
