"""What is kept for training, what is held out of it, and the blacklist between the two."""

from dataclasses import replace

import numpy as np
import pytest

from whisfusion.data.filters import (
    PAPER_FILTERS,
    FilterOptions,
    filter_utterances,
    read_blacklists,
    write_blacklist,
)
from whisfusion.data.holdout import HoldoutOptions, draw_holdout, hold_out
from whisfusion.data.manifest import Utterance, read_manifest
from whisfusion.errors import ManifestError, OptionError
from whisfusion.tokenizer import PROMPT_LENGTH, get_tokenizer


def utterance(number=0, seconds=5.0, **fields):
    base = Utterance(f"u{number}", f"clips/{number}.wav", seconds, "Some words.", "en", "s", "d")
    return replace(base, **fields)


def keep(utterances, options=None, positions=lambda _: 192, **kwargs):
    return filter_utterances(utterances, options or FilterOptions(), positions=positions, **kwargs)


def test_durations_and_languages():
    seconds = (0.99, 1.0, 30.0, 30.01)
    filtered = keep([*(utterance(i, s) for i, s in enumerate(seconds)), utterance(9, language="xx")])
    assert [u.duration for u in filtered.kept] == [1.0, 30.0]
    assert filtered.dropped == {"shorter than 1 s": 1, "longer than 30 s": 1, "language without a token": 1}
    assert "kept" in filtered.render()
    assert "longer than 30 s" in filtered.render()


@pytest.mark.parametrize(("style", "text"), [("normalised", "don't [noise]"), ("written", "Don't.")])
def test_text_fits_its_canvas_with_prompt_and_endoftext(style, text):
    label = "do not" if style == "normalised" else "Don't."
    count = len(get_tokenizer().encode(label))
    options = FilterOptions(text_style=style)
    room = PROMPT_LENGTH + count + 1
    fits = keep([utterance(text=text)], options, lambda _: room)
    assert len(fits.kept) == 1
    np.testing.assert_array_equal(fits.tokens, [count])
    assert keep([utterance(text=text)], options, lambda _: room - 1).dropped == {"text longer than its canvas": 1}


def test_the_canvas_may_follow_the_duration():
    long, short = utterance(0, 20.0, text="word " * 40), utterance(1, 2.0, text="word " * 40)
    assert keep([long, short], positions=lambda seconds: int(5 * seconds)).kept == [long]


def test_text_that_normalises_to_nothing():
    assert keep([utterance(text="[music] (laughs)")]).dropped == {"no text": 1}
    assert keep([utterance(text="  ")], FilterOptions(text_style="written")).dropped == {"no text": 1}


def test_the_papers_rule_for_english():
    names = [
        ("en", "mls"),
        ("en", "CommonVoice"),
        ("en", "common_voice_17"),
        ("en", "voxpopuli"),
        ("en", "earnings-22"),
        ("en", "Earnings22"),
        ("de", "mls"),
        ("zh", "aishell"),
    ]
    filtered = keep([utterance(i, language=n[0], dataset=n[1]) for i, n in enumerate(names)], PAPER_FILTERS)
    assert [(u.language, u.dataset) for u in filtered.kept] == names[1:]
    assert filtered.dropped == {"excluded by language or dataset": 1}


def test_rules():
    assert FilterOptions().wants("en", "a")
    assert not FilterOptions(exclude=("*/a",)).wants("en", "a")
    only = FilterOptions(include=("de/*", "en/b*"))
    assert [only.wants(*c) for c in (("de", "a"), ("en", "big"), ("en", "a"))] == [True, True, False]
    with pytest.raises(OptionError) as caught:
        FilterOptions(exclude=("english",), include=("a/b/c",), min_seconds=5, max_seconds=2)
    for word in ("'english'", "'a/b/c'", "no clip lasts"):
        assert word in str(caught.value)


def test_blacklist_goes_by_path(tmp_path):
    file = utterance(1, root=tmp_path)
    member = utterance(2, audio="2.opus", shard="x.tar", root=tmp_path)
    namesake = utterance(3, audio="2.opus", shard="x.tar", root=tmp_path / "other")
    elsewhere = utterance(4, audio="/data/4.wav")
    assert write_blacklist(tmp_path / "black.txt", [file, member, elsewhere, file]) == 3
    assert (tmp_path / "black.txt").read_text() == "clips/1.wav\nx.tar/2.opus\n/data/4.wav\n"
    with open(tmp_path / "black.txt", "a") as out:
        out.write("\nclips/never.wav\n")
    options = FilterOptions(blacklist=(str(tmp_path / "black.txt"),))
    filtered = keep([file, member, namesake, elsewhere], options)
    assert filtered.kept == [namesake]
    assert filtered.dropped == {"on the blacklist": 3}
    assert filtered.unmatched == (str(tmp_path / "clips/never.wav"),)
    assert "1 blacklisted paths matched nothing" in filtered.render()


def test_missing_blacklists_are_named_together(tmp_path):
    with pytest.raises(ManifestError) as caught:
        read_blacklists([tmp_path / "one.txt", tmp_path / "two.txt"])
    assert "one.txt" in str(caught.value)
    assert "two.txt" in str(caught.value)


def test_progress_is_told():
    seen = []
    keep([utterance(i) for i in range(1001)], progress=lambda done, total: seen.append(done))
    assert seen == [0, 1000]


def corpus(root, count=300):
    reazon = [utterance(i, 4.0, language="ja", dataset="reazonspeech", root=root) for i in range(count)]
    reazon[7] = replace(reazon[7], duration=30.5)
    return [*reazon, *(utterance(count + i, root=root) for i in range(50))]


def test_holdout_and_its_blacklist_part_the_corpus(tmp_path):
    utterances = corpus(tmp_path / "corpus")
    options = HoldoutOptions(count=100, include=("ja/reazon*",))
    result = hold_out(utterances, tmp_path / "reazon-ja.jsonl", options)
    assert result.manifest == tmp_path / "reazon-ja.jsonl"
    assert result.blacklist == tmp_path / "reazon-ja.blacklist.txt"
    assert result.eligible == 299
    held = read_manifest(result.manifest)
    assert len({u.audio_path for u in held}) == 100
    assert all(u.dataset == "reazonspeech" and u.duration <= 30 for u in held)
    filtered = keep(utterances, FilterOptions(blacklist=(str(result.blacklist),)))
    assert filtered.dropped["on the blacklist"] == 100
    assert not {u.id for u in filtered.kept} & {u.id for u in held}
    assert filtered.unmatched == ()
    assert "held out 100 clips" in result.render()


def test_holdout_depends_on_the_seed_and_the_names_alone(tmp_path):
    options = HoldoutOptions(count=50)
    drawn = {u.id for u in draw_holdout(corpus(tmp_path), options)[0]}
    assert drawn == {u.id for u in draw_holdout(corpus(tmp_path / "elsewhere")[::-1], options)[0]}
    other = {u.id for u in draw_holdout(corpus(tmp_path), HoldoutOptions(count=50, seed=43))[0]}
    assert len(drawn & other) < 25
    grown = {u.id for u in draw_holdout(corpus(tmp_path, 330), options)[0]}
    assert len(drawn & grown) > 35


def test_a_file_is_held_out_with_all_its_clips(tmp_path):
    clips = [utterance(i, 4.0, audio=f"{i // 3}.wav", start=4.0 * (i % 3)) for i in range(30)]
    drawn, eligible = draw_holdout(clips, HoldoutOptions(count=4))
    assert eligible == 10
    assert len(drawn) == 12
    assert len({u.audio for u in drawn}) == 4


def test_too_few_to_hold_out(tmp_path):
    with pytest.raises(ManifestError, match=r"cannot hold out 1,000 files: 299 .* match ja/\*"):
        draw_holdout(corpus(tmp_path), HoldoutOptions(include=("ja/*",)))
    with pytest.raises(OptionError, match=r"`count`.*`max_seconds`"):
        HoldoutOptions(count=0, max_seconds=0)
