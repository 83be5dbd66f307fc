"""How tokens follow each other in a language: what repair can know without listening.

Counts of pairs and triples of tokens in text, smoothed as by Kneser and Ney: what is taken from each count goes to what
was never seen, by the model of pairs, and from there to that of single tokens, where a token counts as often as there
are others that it follows. Counts are kept to within a fifth, which is half a byte each.

Letters: N tokens of a text or questions about some, U tokens of the vocabulary, P pairs, T triples.
"""

import functools
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whisfusion.errors import ModelError
from whisfusion.tokenizer import ENDOFTEXT

EDGE = ENDOFTEXT
"""Stands before the first token of a text, twice, and after the last."""

_TOKENS = ENDOFTEXT + 1
_PAIR_DISCOUNT, _TRIPLE_DISCOUNT = 0.75, 1.0
_NEVER_SEEN = 0.5
"""What a token counts that follows no other."""
_STEPS = 2
"""Kept counts are powers of two to the power of one over this."""
_KEY_BYTES = 6
_FORMAT = np.dtype("<i8")


@dataclass(frozen=True)
class Trigrams:
    """Counts of one language."""

    pairs_P: np.ndarray
    """Pairs that were counted, each as one number, ascending."""
    pair_counts_P: np.ndarray
    triples_T: np.ndarray
    triple_counts_T: np.ndarray

    @classmethod
    def count(cls, texts: Iterable[Sequence[int]], *, least: int = 2) -> "Trigrams":
        """Count what is in texts; triples that occur less often than `least` are forgotten."""
        line = [EDGE]
        for tokens in texts:
            line += [EDGE, *tokens, EDGE]
        tokens_N = np.array(line, dtype=np.int64)
        pairs_P, pair_counts_P = np.unique(_joined(tokens_N[:-1], tokens_N[1:]), return_counts=True)
        triples = _joined(tokens_N[:-2], tokens_N[1:-1], tokens_N[2:])
        triples_T, triple_counts_T = np.unique(triples, return_counts=True)
        often_T = triple_counts_T >= least
        return cls(pairs_P, _kept(pair_counts_P), triples_T[often_T], _kept(triple_counts_T[often_T]))

    def logprobs(self, tokens_N3: np.ndarray) -> np.ndarray:
        """Log-probability of the last token of each three, after the other two."""
        a_N, b_N, c_N = tokens_N3.astype(np.int64).T
        single_N = self._single_shares[c_N]
        pair_N = _found(_joined(b_N, c_N), self.pairs_P, self._pair_shares) + self._left_after_token[b_N] * single_N
        seen_N = _found(_joined(a_N, b_N, c_N), self.triples_T, self._triple_shares)
        return np.log(seen_N + _found(_joined(a_N, b_N), self.pairs_P, self._left_after_pair, 1.0) * pair_N)

    def gains(self, tokens: Sequence[int], edits: Iterable[tuple[int, int, Sequence[int]]]) -> np.ndarray:
        """By how much each edit, tokens `first` to `end` replaced by others, changes the log-probability of a text."""
        line = [EDGE, EDGE, *tokens, EDGE]
        before_N = np.append(0.0, np.cumsum(self.logprobs(np.array(_threes(line)))))
        threes, counts, losses = [], [], []
        for first, end, new in edits:
            # Two more tokens are predicted from what is edited.
            last = min(end + 2, len(line) - 2)
            threes += _threes([*line[first : first + 2], *new, *line[end + 2 : last + 2]])
            counts.append(last - end + len(new))
            losses.append(before_N[last] - before_N[first])
        after_N = self.logprobs(np.array(threes, dtype=np.int64).reshape(-1, 3))
        rows = np.repeat(np.arange(len(counts)), counts)
        return np.bincount(rows, after_N, len(counts)) - np.array(losses)

    def __add__(self, other: "Trigrams") -> "Trigrams":
        """The counts of both."""
        pairs = _summed(self.pairs_P, self.pair_counts_P, other.pairs_P, other.pair_counts_P)
        triples = _summed(self.triples_T, self.triple_counts_T, other.triples_T, other.triple_counts_T)
        return Trigrams(*pairs, *triples)

    @functools.cached_property
    def _single_shares(self) -> np.ndarray:
        """Of all the tokens that a token may follow."""
        counts_U = np.maximum(np.bincount(self.pairs_P % _TOKENS, minlength=_TOKENS), _NEVER_SEEN)
        return counts_U / counts_U.sum()

    @functools.cached_property
    def _pair_shares(self) -> np.ndarray:
        """Of what follows the first token, discounted."""
        firsts_P = self.pairs_P // _TOKENS
        counts_U = np.bincount(firsts_P, self.pair_counts_P, minlength=_TOKENS)
        return np.maximum(self.pair_counts_P - _PAIR_DISCOUNT, 0) / counts_U[firsts_P]

    @functools.cached_property
    def _left_after_token(self) -> np.ndarray:
        """Share of what follows a token that is left for what was not counted."""
        return 1 - np.bincount(self.pairs_P // _TOKENS, self._pair_shares, minlength=_TOKENS)

    @functools.cached_property
    def _pair_of_triple(self) -> np.ndarray:
        """Which pair each triple begins with."""
        return np.searchsorted(self.pairs_P, self.triples_T // _TOKENS)

    @functools.cached_property
    def _triple_shares(self) -> np.ndarray:
        """Of what follows the pair, discounted. Triples that were forgotten follow it too."""
        remembered_P = np.bincount(self._pair_of_triple, self.triple_counts_T, minlength=len(self.pairs_P))
        counts_P = np.maximum(self.pair_counts_P, remembered_P)
        return np.maximum(self.triple_counts_T - _TRIPLE_DISCOUNT, 0) / counts_P[self._pair_of_triple]

    @functools.cached_property
    def _left_after_pair(self) -> np.ndarray:
        return 1 - np.bincount(self._pair_of_triple, self._triple_shares, minlength=len(self.pairs_P))

    def pack(self) -> Tensor:
        """Compressed."""
        parts = [np.array([len(self.pairs_P), len(self.triples_T)], dtype=_FORMAT).tobytes()]
        for keys, counts in ((self.pairs_P, self.pair_counts_P), (self.triples_T, self.triple_counts_T)):
            steps = np.diff(keys, prepend=0)
            parts += [(steps >> 8 * place & 255).astype(np.uint8).tobytes() for place in range(_KEY_BYTES)]
            parts.append(_coded(counts).tobytes())
        return torch.from_numpy(np.frombuffer(lzma.compress(b"".join(parts)), dtype=np.uint8).copy())

    @classmethod
    def unpack(cls, packed: Tensor) -> "Trigrams":
        """What `pack` was given. Raises ModelError for anything else."""
        try:
            octets = np.frombuffer(lzma.decompress(packed.numpy().tobytes()), dtype=np.uint8)
            at = 2 * _FORMAT.itemsize
            sizes, tables = octets[:at].view(_FORMAT).tolist(), []
            for size in sizes:
                columns = octets[at : at + (_KEY_BYTES + 1) * size].reshape(_KEY_BYTES + 1, size).astype(np.int64)
                steps = sum(column << 8 * place for place, column in enumerate(columns[:-1]))
                tables += [np.cumsum(steps), 2 ** (columns[-1] / _STEPS)]
                at += (_KEY_BYTES + 1) * size
        except (lzma.LZMAError, ValueError) as error:
            raise ModelError(f"the counts of tokens cannot be read ({error}): pull the model again") from None
        return cls(*tables)


def _joined(*tokens: np.ndarray) -> np.ndarray:
    """Tokens side by side as one number."""
    return functools.reduce(lambda number, token: number * _TOKENS + token, tokens)


def _threes(line: Sequence[int]) -> list[tuple[int, int, int]]:
    """Every three tokens in a row."""
    return list(zip(line, line[1:], line[2:], strict=False))


def _summed(
    keys: np.ndarray, counts: np.ndarray, others: np.ndarray, more: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    every, places = np.unique(np.concatenate((keys, others)), return_inverse=True)
    return every, _kept(np.bincount(places, np.concatenate((counts, more))))


def _coded(counts: np.ndarray) -> np.ndarray:
    return np.round(_STEPS * np.log2(counts)).astype(np.uint8)


def _kept(counts: np.ndarray) -> np.ndarray:
    """Counts as they are kept; none stays none."""
    return np.where(counts > 0, 2 ** (np.round(_STEPS * np.log2(np.maximum(counts, 1))) / _STEPS), 0.0)


def _found(keys_N: np.ndarray, known: np.ndarray, values: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
    if not len(known):
        return np.full(len(keys_N), otherwise)
    place_N = np.searchsorted(known, keys_N).clip(max=len(known) - 1)
    return np.where(known[place_N] == keys_N, values[place_N], otherwise)


class Grammar(Mapping[str, Trigrams]):
    """Trigrams by language code, each unpacked when it is first asked for."""

    def __init__(self, packed: Mapping[str, Tensor]) -> None:
        self._packed = dict(packed)
        self._unpacked: dict[str, Trigrams] = {}

    @classmethod
    def of(cls, trigrams: Mapping[str, Trigrams]) -> "Grammar":
        """From counts."""
        return cls({language: own.pack() for language, own in trigrams.items()})

    def __getitem__(self, language: str) -> Trigrams:
        if language not in self._unpacked:
            self._unpacked[language] = Trigrams.unpack(self._packed[language])
        return self._unpacked[language]

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def pack(self) -> dict[str, Tensor]:
        """As it is kept."""
        return dict(self._packed)
