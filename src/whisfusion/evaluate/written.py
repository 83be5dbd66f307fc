"""Text as it is written: error rates that keep case and punctuation, and how well the punctuation is placed.

A written text is a row of words and punctuation marks, each mark a unit of its own: a missing comma is one deletion
and does not make the word before it wrong. Apostrophes belong to their words, and so does what joins two parts of one
(well-known, 3.5, 10:30). What only typesetting tells apart is one: every kind of quotation mark is ", every dash -.
Where a language is scored by character, so it is here: every character that is no mark is a word.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whisfusion.evaluate.rates import Edits, Rate, count_edits
from whisfusion.normalise import CHARACTER_LANGUAGES, normalise

MARKS = ',.?!:;…"-()[]¿¡、。·'

_ONE_FORM = str.maketrans(
    dict.fromkeys("“”„‟«»‹›「」『』《》〈〉", '"')
    | dict.fromkeys("‘’ʼ", "'")
    | dict.fromkeys("‐–", "-")
    | dict.fromkeys("—―", " - ")  # between words, not within one
    | {"・": "·"}
)
_ELLIPSIS = re.compile(r"\.{2,}")
_MARK = f"[{re.escape(MARKS)}]"
_WORD = rf"[^\s{re.escape(MARKS)}]+"
_WORDS_AND_MARKS = re.compile(rf"{_MARK}|{_WORD}(?:[-.,:·]{_WORD})*")
_CHARACTERS_AND_MARKS = re.compile(r"\S")


@dataclass(frozen=True)
class Punctuation:
    """How much of the punctuation of the references was written, and at the right place."""

    precision: float
    """Share of the marks written that are right."""
    recall: float
    """Share of the marks of the references that were written."""
    f1: float
    right: int
    hypothesis: int
    reference: int


@dataclass(frozen=True)
class Written:
    """How a dataset was written, where references and hypotheses have punctuation."""

    punctuated: Rate
    """Over words and marks, case kept."""
    cased: Rate
    """Over words alone, case kept."""
    punctuation: Punctuation
    """All marks together."""
    marks: Mapping[str, Punctuation]
    """Each mark, the most frequent of the references first."""


@dataclass(frozen=True)
class WrittenEdits:
    """One utterance: its edits, and how often each mark is in both texts at one place, and in either."""

    punctuated: Edits
    cased: Edits
    right: Counter[str]
    hypothesis: Counter[str]
    reference: Counter[str]


def written_units(text: str, language: str) -> list[str]:
    """The words, or characters, and the punctuation marks of `text`, in order."""
    text = _ELLIPSIS.sub("…", unicodedata.normalize("NFKC", text).translate(_ONE_FORM))
    pattern = _CHARACTERS_AND_MARKS if language in CHARACTER_LANGUAGES else _WORDS_AND_MARKS
    return pattern.findall(text)


def judge_written(hypothesis: str, reference: str, language: str) -> WrittenEdits:
    """Compare two written texts.

    Marks belong to the word that they follow, or to the start of the text. They are right where they are in both texts
    after words that the fewest edits put side by side, be those words the same or not.
    """
    from rapidfuzz.distance import Levenshtein

    units_HR = [written_units(text, language) for text in (hypothesis, reference)]
    (words_H, marks_H), (words_R, marks_R) = map(_words_and_marks, units_HR)
    spoken_H, spoken_R = ([normalise(word, language) for word in words] for words in (words_H, words_R))
    right = marks_H[0] & marks_R[0]
    for block in Levenshtein.opcodes(spoken_R, spoken_H):
        if block.tag in ("equal", "replace"):
            for place in range(1, 1 + block.src_end - block.src_start):
                right += marks_H[block.dest_start + place] & marks_R[block.src_start + place]
    return WrittenEdits(
        count_edits(*units_HR),
        count_edits(words_H, words_R),
        right,
        hypothesis=sum(marks_H, Counter()),
        reference=sum(marks_R, Counter()),
    )


def punctuation(judged: Sequence[WrittenEdits]) -> tuple[Punctuation, dict[str, Punctuation]]:
    """Of all marks together, and of each."""
    right, hypothesis, reference = (
        sum((getattr(one, name) for one in judged), Counter()) for name in ("right", "hypothesis", "reference")
    )
    by_mark = {
        mark: _punctuation(right[mark], hypothesis[mark], reference[mark])
        for mark in sorted({*hypothesis, *reference}, key=lambda mark: (-reference[mark], mark))
    }
    return _punctuation(right.total(), hypothesis.total(), reference.total()), by_mark


def _words_and_marks(units: Sequence[str]) -> tuple[list[str], list[Counter[str]]]:
    """The words, and the marks before the first and after each."""
    words: list[str] = []
    marks: list[Counter[str]] = [Counter()]
    for unit in units:
        if unit in MARKS:
            marks[-1][unit] += 1
        else:
            words.append(unit)
            marks.append(Counter())
    return words, marks


def _punctuation(right: int, hypothesis: int, reference: int) -> Punctuation:
    return Punctuation(
        precision=right / max(1, hypothesis),
        recall=right / max(1, reference),
        f1=2 * right / max(1, hypothesis + reference),
        right=right,
        hypothesis=hypothesis,
        reference=reference,
    )
