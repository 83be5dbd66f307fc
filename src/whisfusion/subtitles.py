"""A transcript as subtitles: SubRip and WebVTT."""

import html
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whisfusion.words import Word

if TYPE_CHECKING:
    from whisfusion.transcript import Segment, Transcript

_LINES = 2
_WIDTH, _WIDE_WIDTH = 42, 20
"""Characters of a line, and of one of those that are twice as wide."""
_WIDE = frozenset({"zh", "ja", "yue", "ko"})
_LONGEST = 7.0
"""Seconds that a cue is shown at most."""
_PAUSE = 0.8
"""Seconds of silence after which a new cue begins."""
_LEAST = 0.02
"""Seconds that a cue is shown at least: players take none that ends when it begins."""
_ENOUGH = 0.5
"""Share of a cue that must be full for the end of a sentence to end it."""
_SENTENCE_ENDS = (".", "?", "!", "…", "。", "？", "！")


@dataclass(frozen=True)
class Cue:
    """What is shown at a time, in seconds."""

    start: float
    end: float
    lines: tuple[str, ...]


def to_srt(transcript: "Transcript") -> str:
    """SubRip: numbered cues."""
    return "\n".join(
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{_text(cue)}"
        for number, cue in enumerate(cues(transcript), 1)
    )


def to_vtt(transcript: "Transcript") -> str:
    """WebVTT."""
    return "WEBVTT\n" + "".join(
        f"\n{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{html.escape(_text(cue), quote=False)}"
        for cue in cues(transcript)
    )


def cues(transcript: "Transcript") -> list[Cue]:
    """At most two lines at a time, by the times of words; where words have none, all of a segment at once."""
    return [cue for segment in transcript.segments for cue in _cues_of(segment, transcript.language)]


def _cues_of(segment: "Segment", language: str) -> Iterator[Cue]:
    width = _WIDE_WIDTH if language in _WIDE else _WIDTH
    if not segment.words:
        if segment.text:
            yield Cue(segment.start, segment.end, tuple(textwrap.wrap(segment.text, width)))
        return
    shown: list[Word] = []
    for word in segment.words:
        if shown and _ends(shown, word, width):
            yield _cue(shown, width)
            shown = []
        shown.append(word)
    yield _cue(shown, width)


def _ends(shown: list[Word], following: Word, width: int) -> bool:
    """Whether a cue is over before a word."""
    text = "".join(word.word for word in shown).strip()
    is_sentence = text.endswith(_SENTENCE_ENDS) and len(text) >= _ENOUGH * width
    too_wide = len(_lines([*shown, following], width)) > _LINES
    too_long = following.end - shown[0].start > _LONGEST
    return is_sentence or too_wide or too_long or following.start - shown[-1].end > _PAUSE


def _cue(words: list[Word], width: int) -> Cue:
    return Cue(words[0].start, max(words[-1].end, words[0].start + _LEAST), tuple(_lines(words, width)))


def _lines(words: Sequence[Word], width: int) -> list[str]:
    """Words on as few lines as hold them; one that is wider than a line has one of its own."""
    lines = [""]
    for word in words:
        if lines[-1] and len((lines[-1] + word.word).strip()) > width:
            lines.append("")
        lines[-1] += word.word
    return [line.strip() for line in lines]


def _text(cue: Cue) -> str:
    return "".join(f"{line}\n" for line in cue.lines)


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    return (
        f"{milliseconds // 3_600_000:02}:{milliseconds // 60_000 % 60:02}:{milliseconds // 1000 % 60:02}"
        f"{point}{milliseconds % 1000:03}"
    )
