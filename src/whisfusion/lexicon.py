"""The words of each language, for repair: what CTC spells by ear is most likely one of them."""

import bz2
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from string import ascii_uppercase

import numpy as np
import torch
from torch import Tensor

from whisfusion.errors import ModelError
from whisfusion.normalise import CHARACTER_LANGUAGES

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
"""Letters, with apostrophes between them."""
_MOST = 6
"""Words that may be meant."""
_LONGER = 2
"""Letters by which a word may be longer or shorter than what was heard."""
_LETTERS_WRONG = 3
"""One in so many letters may be wrong."""


class WordList:
    """The words of one language, in lower case."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = frozenset(words)
        self._by_length: dict[int, list[str]] = {}
        for word in sorted(self._words):
            self._by_length.setdefault(len(word), []).append(word)
        # Of each instance its own: a method's cache would keep instances alive.
        self._around = functools.cache(self._of_length_near)
        self.similar = functools.lru_cache(maxsize=1 << 16)(self._similar)
        """`similar(heard)`: the words that are spelled most like what was heard, the most similar first."""
        self.unknown = functools.lru_cache(maxsize=1 << 16)(self._unknown)
        """`unknown(text)`: how many words of a text are none of these. A letter by itself is not counted."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def _unknown(self, text: str) -> int:
        return sum(len(word) > 1 and word not in self._words for word in WORD.findall(text.lower()))

    def _similar(self, heard: str) -> tuple[str, ...]:
        try:
            from rapidfuzz import process
            from rapidfuzz.distance import Levenshtein
        except ImportError:  # a machine with a bare Python: repair does without words
            return ()
        most = max(1, len(heard) // _LETTERS_WRONG)
        words_N, letters_N, longer_N = self._around(len(heard))
        # An edit takes one letter away and brings one at most, and one that changes the length does only one of both:
        # the others need no closer look.
        near_N = np.bitwise_count(letters_N ^ np.uint32(_letters(heard))) <= 2 * most - longer_N
        possible: list[str] = words_N[near_N].tolist()
        found = process.extract(heard, possible, scorer=Levenshtein.distance, limit=_MOST, score_cutoff=most)
        return tuple(possible[place] for _, _, place in found)

    def _of_length_near(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The words that may be meant by something of this length, which letters each has, and by how many letters it
        is longer or shorter.
        """
        around = range(max(2, length - _LONGER), length + _LONGER + 1)
        words = [word for near in around for word in self._by_length.get(near, ())]
        longer_N = np.array([abs(len(word) - length) for word in words], dtype=np.int8)
        return np.array(words, dtype=object), np.array([_letters(word) for word in words], dtype=np.uint32), longer_N


class Lexicon(Mapping[str, WordList]):
    """Words by language code, each language's unpacked when it is first asked for."""

    def __init__(self, packed: Mapping[str, Tensor]) -> None:
        self._packed = dict(packed)
        self._lists: dict[str, WordList] = {}

    @classmethod
    def of(cls, words: Mapping[str, Iterable[str]]) -> "Lexicon":
        """From lists of words: sorted and compressed they take some 130 KB for 75,000."""
        packed = {language: bz2.compress(_shortened(sorted(set(own)))) for language, own in words.items()}
        return cls(
            {name: torch.from_numpy(np.frombuffer(octets, dtype=np.uint8).copy()) for name, octets in packed.items()}
        )

    def __getitem__(self, language: str) -> WordList:
        """Raises ModelError where what was packed cannot be read."""
        if language not in self._lists:
            octets = self._packed[language].numpy().tobytes()
            try:
                self._lists[language] = WordList(_in_full(bz2.decompress(octets)))
            except (OSError, ValueError, TypeError) as error:
                raise ModelError(f"the model's lexicon is not usable ({error}): pull the model again") from None
        return self._lists[language]

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def pack(self) -> dict[str, Tensor]:
        """As it is kept."""
        return dict(self._packed)


def _letters(word: str) -> int:
    """A bit for each letter of a word; letters that are far apart may share one."""
    return functools.reduce(lambda bits, letter: bits | 1 << ord(letter) % 32, word, 0)


def _shortened(words: Iterable[str]) -> bytes:
    """Of each word a capital that says how many letters it shares with the one before, and the other letters."""
    parts, before = [], ""
    for word in words:
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, word, strict=False))
        shared = min(len(list(alike)), len(ascii_uppercase) - 1)
        parts.append(ascii_uppercase[shared] + word[shared:])
        before = word
    return "".join(parts).encode()


def _in_full(shortened: bytes) -> list[str]:
    words, before = [], ""
    for capital, rest in re.findall("([A-Z])([^A-Z]*)", shortened.decode()):
        before = before[: ascii_uppercase.index(capital)] + rest
        words.append(before)
    return words


def word_list(texts: Iterable[str], language: str, *, least: int = 1) -> list[str]:
    """The words that occur at least `least` times, in lower case; none in a language that is written without spaces."""
    if language in CHARACTER_LANGUAGES:
        return []
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    return [word for word, count in counts.items() if count >= least and len(word) > 1]
