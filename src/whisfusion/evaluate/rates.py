"""Edits counted and made into error rates with intervals. Every error rate in this project comes from here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Edits:
    """What separates a hypothesis from its reference, in words or characters."""

    substitutions: int
    deletions: int
    insertions: int
    units: int
    """Of the reference."""

    @property
    def total(self) -> int:
        """All edits."""
        return self.substitutions + self.deletions + self.insertions


@dataclass(frozen=True)
class Rate:
    """An error rate (1.0 is 100 %) over some utterances, with its 95 % interval."""

    utterances: int
    seconds: float
    rate: float
    low: float
    high: float
    substitutions: int
    deletions: int
    insertions: int
    units: int


def count_edits(hypothesis: Sequence[str], reference: Sequence[str]) -> Edits:
    """The fewest edits that make the units of a hypothesis those of its reference, by kind, as jiwer counts them."""
    from rapidfuzz.distance import Levenshtein

    kinds = [operation.tag for operation in Levenshtein.editops(reference, hypothesis)]
    return Edits(kinds.count("replace"), kinds.count("delete"), kinds.count("insert"), len(reference))


def error_rate(edits_U: Sequence[Edits], seconds: float, *, resamples: int, seed: int) -> Rate:
    """The rate over U utterances that last `seconds` together."""
    totals_U = np.array([edits.total for edits in edits_U])
    units_U = np.array([edits.units for edits in edits_U])
    low, high = bootstrap_interval(totals_U, units_U, resamples=resamples, seed=seed)

    def total(of: Callable[[Edits], int]) -> int:
        return sum(map(of, edits_U))

    return Rate(
        utterances=len(edits_U),
        seconds=seconds,
        rate=float(totals_U.sum() / max(1, units_U.sum())),
        low=low,
        high=high,
        substitutions=total(lambda edits: edits.substitutions),
        deletions=total(lambda edits: edits.deletions),
        insertions=total(lambda edits: edits.insertions),
        units=total(lambda edits: edits.units),
    )


def bootstrap_interval(edits_U: np.ndarray, units_U: np.ndarray, *, resamples: int, seed: int) -> tuple[float, float]:
    """95 % interval of sum(edits) / sum(units) over U utterances, drawn again U at a time with replacement."""
    rng = np.random.default_rng(seed)
    count = len(edits_U)
    rates = []
    # Resamples by the row; as many rows at a time as fit in memory, whatever the number of utterances.
    rows = max(1, _DRAWS_AT_ONCE // count)
    for first in range(0, resamples, rows):
        drawn_RU = rng.integers(count, size=(min(rows, resamples - first), count))
        rates.append(edits_U[drawn_RU].sum(1) / np.maximum(1, units_U[drawn_RU].sum(1)))
    low, high = np.percentile(np.concatenate(rates), [2.5, 97.5])
    return float(low), float(high)
