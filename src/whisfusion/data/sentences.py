"""Sentences that a synthesiser reads as they are written."""

import lzma
import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from whisfusion.errors import ManifestError
from whisfusion.normalise import CHARACTER_LANGUAGES, normalise

MAX_SECONDS = 28.0
_BASIC = "abcdefghijklmnopqrstuvwxyz"
_LETTERS = {
    "en": _BASIC + "éèêïñ",
    "de": _BASIC + "äöüß",
    "fr": _BASIC + "àâæçéèêëîïôœùûüÿ",
    "es": _BASIC + "áéíóúüñ",
    "it": _BASIC + "àèéìíîòóùú",
    "nl": _BASIC + "áäéèêëíïóöúü",
    "pl": _BASIC + "ąćęłńóśźż",
    "pt": _BASIC + "áâãàçéêíóôõúü",
}
# Names of characters begin with their script.
_SCRIPTS = {
    "ja": ("HIRAGANA", "KATAKANA", "CJK UNIFIED", "IDEOGRAPHIC ITERATION"),
    "ko": ("HANGUL SYLLABLE",),
    "zh": ("CJK UNIFIED",),
}
_PUNCTUATION = frozenset(" .,;:!?'’…-–—¡¿、。，！？；：")
_QUOTES = dict.fromkeys(map(ord, '"“”„‟«»「」『』《》'))
# Slow speech; what lasts longer all the same is found out when it is spoken.
_CHARACTERS_PER_SECOND = {"ja": 5.0, "ko": 3.5, "zh": 2.8}
_LATIN_CHARACTERS_PER_SECOND = 10.0


def read_sentences(paths: Iterable[str | os.PathLike]) -> list[str]:
    """Return the lines of text files (UTF-8, .xz too), stripped; empty ones are left out.

    Raises ManifestError naming every file that cannot be read.
    """
    sentences: list[str] = []
    problems = []
    for path in map(Path, paths):
        try:
            with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
                sentences += [line for line in map(str.strip, lines) if line]
        except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            problems.append(f"{path} cannot be read: {error}")
    if problems:
        raise ManifestError("; ".join(problems))
    return sentences


def choose_sentences(
    sentences: Iterable[str], language: str, *, without: Collection[str] = ()
) -> tuple[list[str], Counter[str]]:
    """Return what can be spoken as written, each sentence once, and how many were left out for which reason.

    without: sentences (as `sentence_key` has them) of evaluation sets.
    """
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for sentence in sentences:
        sentence = _tidy(sentence)
        if reason := _unspeakable(sentence, language):
            dropped[reason] += 1
            continue
        key = sentence_key(sentence, language)
        if not key or key in kept:
            dropped["said before"] += 1
        elif key in without:
            dropped["shared with an evaluation set"] += 1
        else:
            kept[key] = sentence
    return list(kept.values()), dropped


def sentence_key(sentence: str, language: str) -> str:
    """What counts as the same sentence: normalised, spaces only where they count."""
    text = normalise(sentence, language)
    return text.replace(" ", "") if language in CHARACTER_LANGUAGES else text


def _tidy(sentence: str) -> str:
    """Without what is written but never heard: quotation marks, and the dash that begins a line of dialogue."""
    sentence = unicodedata.normalize("NFC", sentence).translate(_QUOTES)
    return " ".join(sentence.lstrip("-–— ").split())


def _unspeakable(sentence: str, language: str) -> str | None:
    """Why a synthesiser would say something else than what is written, or None."""
    if any(character.isdigit() or character.isnumeric() for character in sentence if not _is_han(character)):
        return "digits"
    if not all(c in _PUNCTUATION or _is_letter(c, language) for c in sentence):
        return "symbols or letters of another language"
    words = "".join(c if c.isalpha() else " " for c in sentence).split()
    if not words:
        return "no words"
    # Spelled out or not, as the program likes; Roman numbers are among them.
    if any(len(word) > 1 and word.isupper() for word in words):
        return "words in capitals"
    if len(sentence) / _CHARACTERS_PER_SECOND.get(language, _LATIN_CHARACTERS_PER_SECOND) > MAX_SECONDS:
        return f"longer than {MAX_SECONDS:g} s"
    return None


def _is_letter(character: str, language: str) -> bool:
    if language in _SCRIPTS:
        return unicodedata.name(character, "").startswith(_SCRIPTS[language])
    return character.lower() in _LETTERS.get(language, _BASIC)


def _is_han(character: str) -> bool:
    """Chinese numbers are words."""
    return unicodedata.name(character, "").startswith("CJK UNIFIED")
