"""The text that is trained on and scored: Whisper's two normalisers, and the one error rate.

English spells contractions out, writes numbers in digits and takes American spelling; every other language
loses case, punctuation and symbols, and keeps its diacritics. Both agree character for character with
Whisper's published ones, so that error rates compare with published error rates. Where those do
something that nobody would have chosen, a comment here begins with "Quirk".
"""

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import combinations
from typing import TYPE_CHECKING

from whisfusion.english_numbers import numbers_in_digits

if TYPE_CHECKING:
    from opencc import OpenCC

CHARACTER_LANGUAGES = frozenset({"zh", "ja", "ko", "th", "lo", "my", "km"})
"""Languages scored by character: their words are not separated by spaces, or not in one agreed way."""


@functools.lru_cache(maxsize=8192)  # selection and scoring meet the same candidate many times
def normalise(text: str, language: str) -> str:
    """`text` as it is scored in `language` (a Whisper code), single spaces between words, none around."""
    return (english_normalise(text) if language == "en" else basic_normalise(text)).strip()


def units(text: str, language: str) -> list[str]:
    """What is counted when `text` is scored: its normalised words, or characters without the spaces.

    Characters are the code points of the normalised text (composed, NFKC). Combining marks are not among
    them: the normaliser makes those into spaces, as Whisper's does.
    """
    normalised = normalise(text, language)
    return list(normalised.replace(" ", "")) if language in CHARACTER_LANGUAGES else normalised.split()


def simplified(text: str) -> str:
    """Chinese `text` in simplified characters, by OpenCC's t2s; OpenCC comes with whisfusion[chinese]."""
    return _opencc().convert(text)


@functools.cache
def _opencc() -> "OpenCC":
    from opencc import OpenCC

    return OpenCC("t2s")


def edit_rate(hypothesis: str, reference: str, language: str) -> float:
    """Word or character error rate of `hypothesis`: edits over the units of `reference`, at least 1.

    Everything that compares transcripts (selection, oracle, scoring) uses this rule. It is jiwer's `wer` on
    normalised text, or `cer` without its spaces; where the reference is empty, insertions are counted.
    """
    reference_units = units(reference, language)
    return edit_distance(units(hypothesis, language), reference_units) / max(1, len(reference_units))


def edit_distance(hypothesis: Sequence[str], reference: Sequence[str]) -> int:
    """The fewest substitutions, deletions and insertions that make one sequence of units the other."""
    levenshtein = _levenshtein()
    return levenshtein(hypothesis, reference) if levenshtein else _edits_in_python(hypothesis, [reference])[0]


def pairwise_edits(sequences: Sequence[Sequence[str]]) -> list[list[int]]:
    """The edit distance of each sequence to each."""
    levenshtein = _levenshtein()
    if levenshtein is None:
        return [_edits_in_python(sequence, sequences) for sequence in sequences]
    edits = [[0] * len(sequences) for _ in sequences]
    for i, j in combinations(range(len(sequences)), 2):
        edits[i][j] = edits[j][i] = levenshtein(sequences[i], sequences[j])
    return edits


@functools.cache  # an import that fails costs more than a distance
def _levenshtein() -> Callable[[Sequence[str], Sequence[str]], int] | None:
    """None on machines with a bare Python: they too select by minimum Bayes risk."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        return None
    return Levenshtein.distance


def _edits_in_python(hypothesis: Sequence[str], references: Sequence[Sequence[str]]) -> list[int]:
    """A column of each table of distances at a time, their steps up and down as the bits of two numbers (Myers, Hyyrö).

    The tables lie side by side in the numbers, a bit between each two of them for what a sum carries over.
    """
    places: dict[str, int] = {}
    tables: list[int] = []
    firsts = bit = 0
    for reference in references:
        tables.append((1 << len(reference)) - 1 << bit)
        firsts |= 1 << bit
        for place, unit in enumerate(reference, bit):
            places[unit] = places.get(unit, 0) | 1 << place
        bit += len(reference) + 1
    every = sum(tables)
    up, down = every, 0
    for unit in hypothesis:
        match = places.get(unit, 0)
        level = (((match & up) + up) ^ up) | match | down
        right_up, right_down = (down | (every & ~(level | up))) << 1 | firsts, (level & up) << 1
        up, down = (right_down | ~(level | right_up)) & every, right_up & level & every
    return [len(hypothesis) + (up & table).bit_count() - (down & table).bit_count() for table in tables]


_BRACKETED = re.compile(r"[<\[][^>\]]*[>\]]")  # Quirk: either closing bracket closes either opening one
_PARENTHESISED = re.compile(r"\([^)]+\)")
_SPACES = re.compile(r"\s+")


class _CharacterTable(dict[int, str]):
    """A table for str.translate that is filled as characters are met."""

    def __init__(self, replace: Callable[[str], str]) -> None:
        super().__init__()
        self._replace = replace

    def __missing__(self, code_point: int) -> str:
        replacement = self[code_point] = self._replace(chr(code_point))
        return replacement


def _without_marks(character: str) -> str:
    """A space for combining marks, symbols and punctuation; anything else as it is."""
    return " " if unicodedata.category(character)[0] in "MSP" else character


_BASIC_CHARACTERS = _CharacterTable(_without_marks)


def basic_normalise(text: str) -> str:
    """Whisper's normaliser for every language but English: lower case, no asides in brackets, no symbols.

    Diacritics stay. A space may be left at either end.
    """
    text = unicodedata.normalize("NFKC", _without_asides(text.lower()))
    return _SPACES.sub(" ", text.translate(_BASIC_CHARACTERS).lower())


def _without_asides(text: str) -> str:
    return _PARENTHESISED.sub("", _BRACKETED.sub("", text))


_FILLERS = re.compile(r"\b(?:hmm|mm|mhm|mmm|uh|um)\b")
_SPACE_BEFORE_APOSTROPHE = re.compile(r"\s+'")
# Quirk: a match takes the digit after the comma with it, so "1,2,3" becomes "12,3".
_COMMA_IN_NUMBER = re.compile(r"(\d),(\d)")
# Quirk: here and in _STRAY_PREFIX the character after a stop is taken too, so one stop of "..." may stay.
_STOP = re.compile(r"\.([^0-9]|$)")
_STRAY_PREFIX = re.compile(r"[.$¢€£]([^0-9])")
_STRAY_PERCENT = re.compile(r"([^0-9])%")
_NUMBER_SYMBOLS = frozenset(".%$¢€£")

_WHOLE_WORDS = {
    "won't": "will not",
    "can't": "can not",
    "let's": "let us",
    "ain't": "aint",
    "y'all": "you all",
    "wanna": "want to",
    "gotta": "got to",
    "gonna": "going to",
    "i'ma": "i am going to",
    "imma": "i am going to",
    "woulda": "would have",
    "coulda": "could have",
    "shoulda": "should have",
    "ma'am": "madam",
    # The space parts a title from a number after its stop, as in "st.5".
    "mr": "mister ",
    "mrs": "missus ",
    "st": "saint ",
    "dr": "doctor ",
    "prof": "professor ",
    "capt": "captain ",
    "gov": "governor ",
    "ald": "alderman ",
    "gen": "general ",
    "sen": "senator ",
    "rep": "representative ",
    "pres": "president ",
    "rev": "reverend ",
    "hon": "honorable ",
    "asst": "assistant ",
    "assoc": "associate ",
    "lt": "lieutenant ",
    "col": "colonel ",
    "jr": "junior ",
    "sr": "senior ",
    "esq": "esquire ",
}
# Before these participles 'd and 's stand for had and has; "'s done" may also be "is done" and is left out.
_PERFECT_TENSES = {
    "'d been": " had been",
    "'s been": " has been",
    "'d gone": " had gone",
    "'s gone": " has gone",
    "'d done": " had done",
    "'s got": " has got",
}
_NOT = re.compile(r"n't\b")  # a pass of its own: it makes a boundary, which the ends below may need ("'tn't")
_WORD_ENDS = {
    "'re": " are",
    "'s": " is",  # Quirk: a possessive too
    "'d": " would",
    "'ll": " will",
    "'t": " not",
    "'ve": " have",
    "'m": " am",
}


def _replacer(table: dict[str, str], before: str = "") -> Callable[[str], str]:
    """A function that replaces every key of `table`, followed by a word boundary, in one pass."""
    pattern = re.compile(before + "(?:" + "|".join(map(re.escape, table)) + r")\b")
    return functools.partial(pattern.sub, lambda match: table[match[0]])


_expand_whole_words = _replacer(_WHOLE_WORDS, before=r"\b")
_expand_perfect_tenses = _replacer(_PERFECT_TENSES)
_expand_word_ends = _replacer(_WORD_ENDS)

# Letters that Unicode does not take apart into a plain letter and a mark.
# fmt: off
_PLAIN_LETTERS = {
    "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "ß": "ss", "ẞ": "SS",
    "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "þ": "th", "Þ": "th", "ł": "l", "Ł": "L",
}
# fmt: on


def _english_character(character: str) -> str:
    """Plain letters; nothing for an accent; a space for a symbol, unless it may belong to a number."""
    if character in _NUMBER_SYMBOLS:
        return character
    if unicodedata.category(character) == "Mn":
        return ""
    return _PLAIN_LETTERS.get(character) or _without_marks(character)


_ENGLISH_CHARACTERS = _CharacterTable(_english_character)


def english_normalise(text: str) -> str:
    """Whisper's English normaliser: as the basic one, with plain letters, words and numbers in one spelling.

    "Mr. Neil won't pay $2.5 million in grey" gives "mister neil will not pay $2500000 in gray".
    A space may be left at either end.
    """
    text = _FILLERS.sub("", _without_asides(text.lower()))
    text = _SPACE_BEFORE_APOSTROPHE.sub("'", text)
    text = _NOT.sub(" not", _expand_perfect_tenses(_expand_whole_words(text)))
    text = _expand_word_ends(text)
    text = _COMMA_IN_NUMBER.sub(r"\1\2", text)
    text = _STOP.sub(r" \1", text)
    # Quirk: what NFKD writes out only now (… as three stops, ℌ as a capital H) has missed the steps above.
    text = unicodedata.normalize("NFKD", text).translate(_ENGLISH_CHARACTERS)

    spelling = _american_spelling()
    text = " ".join(spelling.get(word, word) for word in numbers_in_digits(text).split())
    if _NUMBER_SYMBOLS.isdisjoint(text):
        return text

    text = _STRAY_PREFIX.sub(r" \1", text)
    text = _STRAY_PERCENT.sub(r"\1 ", text)
    return _SPACES.sub(" ", text)


@functools.cache
def _american_spelling() -> dict[str, str]:
    asset = resources.files("whisfusion").joinpath("assets/english_spelling.json")
    return json.loads(asset.read_text(encoding="utf-8"))
