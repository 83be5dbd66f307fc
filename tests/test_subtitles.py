import itertools

import pytest

from whisfusion.subtitles import cues, to_srt, to_vtt
from whisfusion.transcript import Segment, Transcript
from whisfusion.words import Word


def segment(words: str, *, start: float = 0.0, each: float = 0.4, pauses: dict[int, float] | None = None) -> Segment:
    """Words one after another, with a pause before some of them."""
    timed, now = [], start
    for number, word in enumerate(words.split()):
        now += (pauses or {}).get(number, 0.0)
        timed.append(Word(f" {word}", round(now, 3), round(now + each, 3), 0.9))
        now += each
    return Segment(0, start, now, words, (), -0.1, 0.0, words=tuple(timed))


def transcript(*segments: Segment, language: str = "en") -> Transcript:
    return Transcript(" ".join(s.text for s in segments), language, segments[-1].end, segments)


def test_srt_and_vtt():
    said = transcript(segment("Good morning.", start=3_661.5))
    assert to_srt(said) == "1\n01:01:01,500 --> 01:01:02,300\nGood morning.\n"
    assert to_vtt(said) == "WEBVTT\n\n01:01:01.500 --> 01:01:02.300\nGood morning.\n"


def test_srt_numbers_its_cues():
    srt = to_srt(transcript(segment("one two", pauses={1: 2.0})))
    assert srt.split("\n\n")[1].startswith("2\n00:00:02,400 --> 00:00:02,800\ntwo")


def test_a_cue_has_two_lines_and_seven_seconds_at_most():
    shown = cues(transcript(segment("word " * 200, each=0.2)))
    assert " ".join(line for cue in shown for line in cue.lines).split() == ["word"] * 200
    assert all(len(cue.lines) <= 2 and max(map(len, cue.lines)) <= 42 for cue in shown)
    assert len(cues(transcript(segment("slow " * 10, each=2.0)))) == 4
    assert all(one.end <= two.start for one, two in itertools.pairwise(shown))


def test_sentences_and_pauses_end_a_cue():
    said = segment("This is the end of it. Not. That goes on and on", pauses={9: 1.0})
    assert [" ".join(cue.lines) for cue in cues(transcript(said))] == [
        "This is the end of it.",
        "Not. That goes",
        "on and on",
    ]


def test_without_times_of_words_a_segment_is_one_cue():
    said = Segment(0, 1.0, 4.0, "no times " * 12, (), -0.1, 0.0)
    [cue] = cues(transcript(said))
    assert (cue.start, cue.end) == (1.0, 4.0)
    assert all(len(line) <= 42 for line in cue.lines)
    assert cues(transcript(Segment(0, 0.0, 9.0, "", (), -0.1, 1.0))) == []


@pytest.mark.parametrize(("write", "empty"), [(to_srt, ""), (to_vtt, "WEBVTT\n")])
def test_nothing_said_is_a_valid_file(write, empty):
    assert write(transcript(Segment(0, 0.0, 9.0, "", (), -0.1, 1.0))) == empty


def test_vtt_shows_what_would_be_a_tag():
    said = transcript(segment("AT&T <laughs>"))
    assert "AT&amp;T &lt;laughs&gt;\n" in to_vtt(said)
    assert "AT&T <laughs>\n" in to_srt(said)


def test_a_cue_ends_after_it_begins():
    said = Segment(0, 0.0, 2.0, "a", (), -0.1, 0.0, words=(Word(" a", 2.0, 2.0, 0.0),))
    [cue] = cues(transcript(said))
    assert cue.end > cue.start


def test_chinese_is_wrapped_by_character():
    words = tuple(Word(character, i * 0.2, i * 0.2 + 0.2, 0.9) for i, character in enumerate("天" * 70))
    said = Segment(0, 0.0, 14.0, "天" * 70, (), -0.1, 0.0, words=words)
    shown = cues(transcript(said, language="zh"))
    assert "".join(line for cue in shown for line in cue.lines) == "天" * 70
    assert all(len(line) <= 20 for cue in shown for line in cue.lines)
