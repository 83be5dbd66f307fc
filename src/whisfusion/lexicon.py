"""The words of each language, for repair: what CTC spells by ear is most likely one of them."""

import functools
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Mapping

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


class Lexicon:
    """Words in lower case, by language code."""

    def __init__(self, words: Mapping[str, Iterable[str]]) -> None:
        self._by_length: dict[str, dict[int, list[str]]] = {}
        for language, own in words.items():
            lengths = self._by_length.setdefault(language, {})
            for word in sorted(set(own)):
                lengths.setdefault(len(word), []).append(word)
        # Of each instance its own: a method's cache would keep instances alive.
        self.similar = functools.lru_cache(maxsize=1 << 16)(self._similar)
        """`similar(language, heard)`: the words that are spelled most like what was heard, the most similar first."""

    def words(self, language: str) -> list[str]:
        """All of a language; none where it has no list."""
        return [word for words in self._by_length.get(language, {}).values() for word in words]

    @property
    def languages(self) -> tuple[str, ...]:
        """Those that have a list."""
        return tuple(self._by_length)

    def _similar(self, language: str, heard: str) -> tuple[str, ...]:
        try:
            from rapidfuzz import process
            from rapidfuzz.distance import Levenshtein
        except ImportError:  # a machine with a bare Python: repair does without words
            return ()
        lengths = self._by_length.get(language, {})
        around = range(max(2, len(heard) - _LONGER), len(heard) + _LONGER + 1)
        found = process.extract(
            heard,
            [word for length in around for word in lengths.get(length, ())],
            scorer=Levenshtein.distance,
            limit=_MOST,
            score_cutoff=max(1, len(heard) // _LETTERS_WRONG),
        )
        return tuple(word for word, _, _ in found)

    def pack(self) -> dict[str, Tensor]:
        """Sorted words, a line each and compressed: some 80 KB for 34,000 words."""
        lines = {language: "\n".join(sorted(self.words(language))).encode() for language in self._by_length}
        packed = {
            language: np.frombuffer(lzma.compress(text, preset=9), dtype=np.uint8) for language, text in lines.items()
        }
        return {language: torch.from_numpy(octets.copy()) for language, octets in packed.items()}

    @classmethod
    def unpack(cls, packed: Mapping[str, Tensor]) -> "Lexicon":
        """What `pack` was given. Raises ModelError for anything else."""
        try:
            return cls(
                {
                    name: lzma.decompress(octets.numpy().tobytes()).decode().split("\n")
                    for name, octets in packed.items()
                }
            )
        except (lzma.LZMAError, UnicodeDecodeError, TypeError) as error:
            raise ModelError(f"the model's lexicon is not usable ({error}): pull the model again") from None


def word_list(texts: Iterable[str], language: str, *, least: int = 2) -> list[str]:
    """The words that occur at least `least` times, in lower case; none in a language that is written without spaces."""
    if language in CHARACTER_LANGUAGES:
        return []
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    return [word for word, count in counts.items() if count >= least and len(word) > 1]
