"""`whisfusion data check`: what it counts, what it finds, what makes it fail."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from whisfusion.data.check import KINDS, CheckOptions, check_data
from whisfusion.data.manifest import Utterance, write_manifest
from whisfusion.errors import OptionError

DECODE_NOTHING = CheckOptions(decode="none")


def clip(folder, number, seconds=2.0, **fields):
    path = folder / f"{number}.wav"
    soundfile.write(path, np.full(round(seconds * 16_000), 0.01), 16_000)
    base = Utterance(f"c{number}", path.name, seconds, f"Sentence {number}.", "en", f"s{number}", "d", root=folder)
    return replace(base, **fields)


def check(folder, utterances, options=DECODE_NOTHING, against=()):
    write_manifest(folder / "train.jsonl", utterances)
    if against:
        write_manifest(folder / "test.jsonl", against)
    return check_data([folder / "train.jsonl"], against=[folder / "test.jsonl"] if against else [], options=options)


def kinds(report):
    return {finding.kind: finding.count for finding in report.findings}


def test_good_data(tmp_path):
    utterances = [clip(tmp_path, i) for i in range(3)]
    utterances.append(clip(tmp_path, 3, 7.2, language="de", dataset="e"))
    report = check(tmp_path, utterances, CheckOptions(decode="all"))
    assert report.ok
    assert report.findings == []
    assert report.decoded == 4
    german, english = report.corpora
    assert (german.language, german.dataset, german.utterances, german.speakers) == ("de", "e", 1, 1)
    assert english.hours == pytest.approx(6 / 3600)
    assert (english.shortest, english.longest, english.utterances) == (2.0, 2.0, 3)
    text = report.render()
    assert "4 utterances, 0.00 h, 4 of them decoded" in text
    assert "nothing wrong" in text


WRONG = {
    "too-long": {"duration": 30.5},
    "no-text": {"text": "[applause] (laughs)!"},
    "no-language-token": {"language": "xx"},
    "duplicate-id": {"id": "c0"},
    "duplicate-audio": {"audio": "0.wav"},
    "missing-audio": {"audio": "gone.wav"},
}


@pytest.mark.parametrize("kind", WRONG)
def test_each_thing_that_is_wrong_fails(tmp_path, kind):
    good, other = clip(tmp_path, 0), clip(tmp_path, 1)
    report = check(tmp_path, [good, replace(other, **WRONG[kind])])
    assert kinds(report) == {kind: 1}
    assert not report.ok
    assert f"WRONG  {kind}: 1" in report.render()
    allowed = check(tmp_path, [good, replace(other, **WRONG[kind])], CheckOptions(decode="none", allow=(kind,)))
    assert kinds(allowed) == {kind: 1}
    assert allowed.ok


NOTEWORTHY = {
    "too-short": {"duration": 0.5},
    "repeated-sentence": {"text": "SENTENCE, 0", "speaker": "s0"},
}


@pytest.mark.parametrize("kind", NOTEWORTHY)
def test_what_is_only_noted(tmp_path, kind):
    report = check(tmp_path, [clip(tmp_path, 0), clip(tmp_path, 1, **NOTEWORTHY[kind])])
    assert kinds(report) == {kind: 1}
    assert report.ok


def test_the_same_file_may_hold_several_clips(tmp_path):
    utterances = [clip(tmp_path, 0, id="a", start=0.0), clip(tmp_path, 0, id="b", start=1.0, speaker="t")]
    assert check(tmp_path, utterances).ok


def test_bad_lines_are_reported_beside_the_rest(tmp_path):
    write_manifest(tmp_path / "m.jsonl", [clip(tmp_path, 0, duration=31.0)])
    with open(tmp_path / "m.jsonl", "a") as out:
        out.write("{oops\n")
    report = check_data([tmp_path / "m.jsonl", tmp_path / "gone.jsonl"], options=DECODE_NOTHING)
    assert kinds(report) == {"bad-line": 2, "too-long": 1}
    assert report.corpora[0].utterances == 1


def test_nothing_at_all_is_wrong(tmp_path):
    report = check_data([tmp_path / "gone"], options=DECODE_NOTHING)
    assert not report.ok
    assert "no such file" in report.render()


def test_decoding_finds_broken_clips_and_wrong_durations(tmp_path):
    broken, wrong = clip(tmp_path, 0), clip(tmp_path, 1, duration=2.5)
    Path(broken.file).write_text("no sound at all")
    gone = replace(broken, id="gone", audio="gone.wav", speaker="t")
    utterances = [broken, wrong, gone, clip(tmp_path, 2)]
    assert kinds(check(tmp_path, utterances)) == {"missing-audio": 1}
    seen = []
    report = check_data(
        [tmp_path / "train.jsonl"],
        options=CheckOptions(decode="all"),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert kinds(report) == {"missing-audio": 1, "undecodable": 1, "wrong-duration": 1}
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    examples = {finding.kind: finding.examples for finding in report.findings}
    assert examples["undecodable"][0].startswith("c0: ")
    assert "2.00 s, the manifest has 2.50 s" in examples["wrong-duration"][0]


def test_a_sample_of_each_corpus_is_decoded(tmp_path):
    utterances = [clip(tmp_path, i, dataset="ab"[i % 2]) for i in range(10)]
    assert check(tmp_path, utterances, CheckOptions(decode="sample", sample_size=3)).decoded == 6
    assert check(tmp_path, utterances, CheckOptions(decode="sample", sample_size=30)).decoded == 10


def test_against_an_evaluation_set(tmp_path):
    train = [
        clip(tmp_path, 0, text="It's GOOD, isn't it?"),
        clip(tmp_path, 1, speaker="x"),
        clip(tmp_path, 2, speaker="x"),
        clip(tmp_path, 3, language="de", speaker="y", text="gut"),
        clip(tmp_path, 4, language="zh", text="你 好。"),
    ]
    test = [
        clip(tmp_path, 10, text="it is good is not it"),
        clip(tmp_path, 11, speaker="x"),
        clip(tmp_path, 12, language="en", speaker="y", text="gut"),
        clip(tmp_path, 13, language="zh", text="你好"),
    ]
    assert check(tmp_path, train).ok
    report = check(tmp_path, train, against=test)
    assert not report.ok
    assert kinds(report) == {"shared-sentence": 2, "shared-speaker": 1}
    examples = {finding.kind: finding.examples for finding in report.findings}
    assert examples["shared-sentence"][0].startswith("c0 and c10")
    assert examples["shared-speaker"] == ("x, in c1 and c11",)


def test_long_lists_are_cut(tmp_path):
    report = check(tmp_path, [clip(tmp_path, i, 1.0, duration=40.0) for i in range(12)])
    assert len(report.findings[0].examples) == 10
    assert "... and 2 more" in report.render()


def test_options_report_every_problem():
    with pytest.raises(OptionError) as caught:
        CheckOptions(decode="some", sample_size=0, allow=("nonsense",))
    for word in ("`decode`", "`sample_size`", "'nonsense'"):
        assert word in str(caught.value)
    assert "shared-speaker" in KINDS


def test_real_speech_is_fit_to_train_on():
    folder = os.environ.get("WHISFUSION_SPEECH")
    if not folder:
        pytest.skip("WHISFUSION_SPEECH is not set")
    speech = Path(folder)
    report = check_data(
        [speech / "train"],
        against=[speech / "dev", speech / "test"],
        options=CheckOptions(decode="sample", sample_size=2),
    )
    assert report.ok, report.render()
    same = check_data([speech / "dev"], against=[speech / "dev"], options=DECODE_NOTHING)
    assert kinds(same)["shared-sentence"] == sum(row.utterances for row in same.corpora)
