import json
import lzma
import random
from pathlib import Path

import jiwer
import numpy as np
import pytest

from whisfusion.data.manifest import Utterance
from whisfusion.errors import ManifestError, OptionError
from whisfusion.evaluate.rates import bootstrap_interval, count_edits
from whisfusion.evaluate.score import Report, ScoreOptions, read_hypotheses, score
from whisfusion.evaluate.tables import render_report
from whisfusion.normalise import normalise

# Both count whole numbers and divide once.
RATE_TOLERANCE = 1e-12
# 2.5 % points of 4,000 resamples against the same of 1,000.
INTERVAL_TOLERANCE = 0.02

WORDS = ("the", "a", "cat", "sat", "on", "under", "colour", "color", "Mr.", "twenty", "one", "21", "won't", "it's")
CHARACTERS = "今日は良い天気です。明日も晴れるでしょう、"


def utterance(name: str, text: str, language: str = "en", *, seconds: float = 3.0, dataset: str = "set") -> Utterance:
    return Utterance(name, f"{name}.wav", seconds, text, language, dataset=dataset)


def hypothesis(name: str, text: str, dataset: str = "set", **more: object) -> dict:
    return {"id": name, "dataset": dataset, "text": text, **more}


def corpus(size: int, language: str = "en") -> tuple[list[Utterance], list[dict]]:
    """Random references, and hypotheses with random edits; empty ones on either side are among them."""
    rng = random.Random(5)
    pool, space = (CHARACTERS, "") if language == "ja" else (WORDS, " ")
    utterances, hypotheses = [], []
    for number in range(size):
        said = rng.choices(pool, k=rng.randrange(1, 15))
        heard = [rng.choice(pool) if rng.random() < 0.2 else word for word in said if rng.random() < 0.9]
        heard += rng.choices(pool, k=rng.randrange(2)) if number % 7 else []
        text = space.join(said) if number % 11 else ""
        utterances.append(utterance(f"u{number}", text, language, seconds=rng.uniform(0.5, 33)))
        hypotheses.append(hypothesis(f"u{number}", space.join(heard) if number % 5 else ""))
    return utterances, hypotheses


@pytest.mark.parametrize("language", ["en", "de", "ja"])
def test_edits_are_those_that_jiwer_counts(language: str):
    utterances, hypotheses = corpus(200, language)
    references = [normalise(u.text, language) for u in utterances]
    texts = [normalise(h["text"], language) for h in hypotheses]
    # jiwer refuses empty references: they are looked at apart.
    kept = [i for i, reference in enumerate(references) if reference]
    assert len(kept) < len(references)
    if language == "ja":
        spaceless = [[text.replace(" ", "") for text in side] for side in (references, texts)]
        theirs = jiwer.process_characters(*([side[i] for i in kept] for side in spaceless))
        rate = theirs.cer
    else:
        theirs = jiwer.process_words([references[i] for i in kept], [texts[i] for i in kept])
        rate = theirs.wer
    report = score([hypotheses[i] for i in kept], [utterances[i] for i in kept])
    ours = report.scores[0]
    assert ours.measure == ("cer" if language == "ja" else "wer")
    assert ours.selected.substitutions == theirs.substitutions
    assert ours.selected.deletions == theirs.deletions
    assert ours.selected.insertions == theirs.insertions
    assert ours.selected.units == theirs.hits + theirs.substitutions + theirs.deletions
    assert ours.selected.rate == pytest.approx(rate, abs=RATE_TOLERANCE)


def test_what_is_heard_where_nothing_was_said_is_inserted():
    report = score(
        [hypothesis("a", "hello you"), hypothesis("b", "red blue")], [utterance("a", ""), utterance("b", "red blue")]
    )
    assert report.scores[0].selected.insertions == 2
    assert report.scores[0].selected.rate == 1.0


def test_count_edits_by_kind():
    edits = count_edits(list("axcde"), list("abcd"))
    assert (edits.substitutions, edits.deletions, edits.insertions, edits.units, edits.total) == (1, 0, 1, 4, 2)
    assert count_edits([], ["a", "b"]).deletions == 2


def test_bins_hold_every_utterance_once_and_add_up():
    utterances, hypotheses = corpus(200)
    edges = [utterance("five", "red", seconds=5.0), utterance("thirty", "red", seconds=30.0)]
    hypotheses += [hypothesis("five", "red"), hypothesis("thirty", "red")]
    result = score(hypotheses, [*utterances, *edges]).scores[0]
    assert [b.start for b in result.bins] == [0, 5, 10, 15, 20, 25, 30]
    assert [b.end for b in result.bins] == [5, 10, 15, 20, 25, 30, None]
    for name in ("utterances", "substitutions", "deletions", "insertions", "units"):
        assert sum(getattr(b.selected, name) for b in result.bins) == getattr(result.selected, name)
    durations = [u.duration for u in [*utterances, *edges]]
    assert result.bins[1].selected.utterances == sum(5 <= d < 10 for d in durations)
    assert result.bins[6].selected.utterances == sum(d >= 30 for d in durations)


def test_the_interval_is_that_of_a_plain_bootstrap():
    rng = random.Random(1)
    edits = [rng.randrange(6) for _ in range(80)]
    units = [rng.randrange(1, 12) for _ in range(80)]
    rates = []
    for _ in range(4000):
        drawn = rng.choices(range(80), k=80)
        rates.append(sum(edits[i] for i in drawn) / sum(units[i] for i in drawn))
    low, high = bootstrap_interval(np.array(edits), np.array(units), resamples=1000, seed=0)
    assert low == pytest.approx(np.percentile(rates, 2.5), abs=INTERVAL_TOLERANCE)
    assert high == pytest.approx(np.percentile(rates, 97.5), abs=INTERVAL_TOLERANCE)
    assert low < sum(edits) / sum(units) < high


def test_scoring_twice_gives_the_same_and_another_seed_another_interval():
    utterances, hypotheses = corpus(50)
    first = score(hypotheses, utterances)
    assert score(list(reversed(hypotheses)), utterances) == first
    other = score(hypotheses, utterances, ScoreOptions(seed=1))
    assert other.scores[0].selected.rate == first.scores[0].selected.rate
    assert other.scores[0].selected.low != first.scores[0].selected.low


def test_memory_does_not_decide_the_interval(monkeypatch: pytest.MonkeyPatch):
    edits, units = np.arange(40) % 5, np.full(40, 7)
    whole = bootstrap_interval(edits, units, resamples=100, seed=3)
    monkeypatch.setattr("whisfusion.evaluate.rates._DRAWS_AT_ONCE", 300)
    assert bootstrap_interval(edits, units, resamples=100, seed=3) == whole


def candidates(*pairs: tuple[str, float]) -> list[dict]:
    return [{"text": text, "confidence": confidence, "risk": 0.0, "score": 0.0} for text, confidence in pairs]


def test_other_selections_are_scored_from_the_candidates():
    records = [
        hypothesis(
            "a", "red blue", candidates=candidates(("red blue", -2.0), ("red blue green", -1.0), ("five", -0.5))
        ),
        hypothesis("b", "four"),
    ]
    result = score(records, [utterance("a", "red blue green"), utterance("b", "four")]).scores[0]
    assert result.selected.rate == pytest.approx(1 / 4)
    assert result.oracle == 0
    assert result.confidence == pytest.approx(3 / 4)


def test_without_candidates_there_are_no_other_selections():
    result = score([hypothesis("a", "red")], [utterance("a", "red")]).scores[0]
    assert result.oracle is None
    assert result.confidence is None


def test_words_and_characters_are_never_added_up():
    utterances = [
        utterance("a", "red blue", "en", dataset="x"),
        utterance("b", "eins zwei", "German", dataset="x"),
        utterance("c", "一二三四", "zh", dataset="y"),
    ]
    records = [hypothesis("a", "red", "x"), hypothesis("b", "eins zwei", "x"), hypothesis("c", "一二三", "y")]
    report = score(records, utterances)
    assert [(s.dataset, s.language, s.measure) for s in report.scores] == [
        ("x", "de", "wer"),
        ("x", "en", "wer"),
        ("y", "zh", "cer"),
    ]
    (total,) = report.totals
    assert (total.measure, total.selected.units, total.selected.rate) == ("wer", 4, 0.25)


def test_missing_hypotheses_are_an_error_unless_one_says_otherwise():
    utterances, records = [utterance("a", "red"), utterance("b", "blue")], [hypothesis("a", "red")]
    with pytest.raises(ManifestError, match=r"1 of 2 utterances have no hypothesis, the first b.*--missing"):
        score(records, utterances)
    empty = score(records, utterances, ScoreOptions(missing="empty"))
    assert (empty.scores[0].selected.rate, empty.scores[0].missing) == (0.5, 1)
    assert "1 without a hypothesis, counted as empty" in render_report(empty)
    skipped = score(records, utterances, ScoreOptions(missing="skip"))
    assert (skipped.scores[0].selected.rate, skipped.scores[0].missing) == (0.0, 1)
    assert "1 without a hypothesis, left out" in render_report(skipped)


def test_failures_count_as_empty_text_and_are_told():
    report = score([hypothesis("a", "", error="a: no such file")], [utterance("a", "red blue")])
    assert (report.scores[0].selected.deletions, report.scores[0].errors) == (2, 1)
    assert "1 not decoded" in render_report(report)


def test_hypotheses_of_other_utterances_are_counted():
    report = score([hypothesis("a", "red"), hypothesis("z", "red")], [utterance("a", "red")])
    assert report.unknown == 1
    assert "1 hypotheses of other utterances" in render_report(report)


def test_two_hypotheses_for_one_utterance_are_refused():
    with pytest.raises(ManifestError, match="two hypotheses for a of set"):
        score([hypothesis("a", "red"), hypothesis("a", "blue")], [utterance("a", "red")])


def test_chinese_is_folded_on_both_sides_where_one_asks():
    utterances = [utterance("a", "漢語很乾淨", "zh"), utterance("b", "汉语", "zh"), utterance("c", "漢字", "ja")]
    records = [hypothesis("a", "汉语很干净"), hypothesis("b", "漢語"), hypothesis("c", "汉字")]
    plain, folded = (score(records, utterances, ScoreOptions(fold_chinese=fold)) for fold in (False, True))
    assert [s.selected.substitutions for s in plain.scores] == [1, 6]
    assert [s.selected.substitutions for s in folded.scores] == [1, 0]
    assert "OpenCC" in render_report(folded)
    assert "OpenCC" not in render_report(plain)


def test_written_references_are_scored_with_case_and_punctuation_too():
    utterances = [
        utterance("a", "Yes, I see.", dataset="written"),
        utterance("b", "YES I SEE THE BOYS' HATS", dataset="capitals"),
    ]
    records = [hypothesis("a", "yes, i see.", "written"), hypothesis("b", "Yes, I see the boys' hats.", "capitals")]
    report = score(records, utterances)
    capitals, written = report.scores
    assert capitals.written is None
    assert report.totals[0].written is None
    assert written.written is not None
    assert written.selected.rate == 0
    assert written.written.punctuated.rate == pytest.approx(2 / 5)
    assert written.written.cased.rate == pytest.approx(2 / 3)
    assert written.written.punctuation.f1 == 1
    assert "40.00" in render_report(report)
    assert "precision" not in render_report(score(records, utterances[1:]))


def test_detected_languages_are_compared_with_the_manifests():
    utterances = [utterance(name, "rot", "German") for name in "abcd"]
    heard = {"a": "de", "b": "nl", "c": "nl"}
    records = [hypothesis(name, "rot", detected_language=language) for name, language in heard.items()]
    report = score([*records, hypothesis("d", "", error="d: no such file")], utterances)
    detected = report.scores[0].detected
    assert detected is not None
    assert (detected.utterances, detected.right, detected.mistaken) == (3, 1, {"nl": 2})
    assert "33.33" in render_report(report)
    assert score([hypothesis("a", "rot")], utterances[:1]).scores[0].detected is None


def test_the_report_is_json_and_a_table():
    report = score(*reversed(corpus(30)))
    assert isinstance(report, Report)
    assert json.loads(json.dumps(report.to_dict()))["scores"][0]["selected"]["utterances"] == 30
    assert f"{100 * report.scores[0].selected.rate:.2f}" in render_report(report)
    assert "WER by duration, set (en)" in render_report(report)


def test_compressed_hypotheses_are_read_as_they_are(tmp_path: Path):
    line = json.dumps(hypothesis("a", "汉语"))
    (tmp_path / "h.jsonl.xz").write_bytes(lzma.compress(f"{line}\n".encode()))
    assert read_hypotheses(tmp_path / "h.jsonl.xz") == [hypothesis("a", "汉语")]
    (tmp_path / "h.jsonl.xz").write_bytes(b"cut off")
    with pytest.raises(ManifestError, match="xz cannot be read"):
        read_hypotheses(tmp_path / "h.jsonl.xz")


def test_bad_lines_are_named_all_at_once(tmp_path: Path):
    file = tmp_path / "h.jsonl"
    file.write_text('{"id": "a", "dataset": "s", "text": "x"}\nnot json\n{"id": "b", "dataset": "s"}\n[]\n')
    with pytest.raises(ManifestError) as caught:
        read_hypotheses(file, tmp_path / "none.jsonl")
    for part in ("line 2", "line 3", "line 4", "none.jsonl cannot be read"):
        assert part in str(caught.value)


def test_options_are_checked_all_at_once():
    with pytest.raises(OptionError, match=r"missing must be.*resamples must be"):
        ScoreOptions(missing="often", resamples=0)  # ty: ignore[invalid-argument-type]
