"""How much of each corpus a model hears: the paper's two-level temperature shares.

A bucket is a (language, dataset). Language l has share p(l) ~ h(l)^0.3 of its total hours h(l), and dataset d
within it p(d | l) ~ h(l, d)^0.5: large corpora are heard less than their size, small ones more.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from whisfusion.data.manifest import Utterance
from whisfusion.data.table import text_table
from whisfusion.errors import OptionError

Bucket = tuple[str, str]
LANGUAGE_ALPHA = 0.3
DATASET_ALPHA = 0.5


def target_shares(
    hours: Mapping[Bucket, float],
    *,
    language_alpha: float = LANGUAGE_ALPHA,
    dataset_alpha: float = DATASET_ALPHA,
) -> dict[Bucket, float]:
    """Return each bucket's share of the utterances drawn; the shares sum to 1.

    An alpha of 1 gives the natural share of hours, 0 the same share to each. Raises OptionError for a bucket
    without hours.
    """
    OptionError.collect([f"the bucket {b} holds {h} hours" for b, h in hours.items() if not h > 0])
    by_language: dict[str, dict[str, float]] = defaultdict(dict)
    for (language, dataset), amount in hours.items():
        by_language[language][dataset] = amount
    across = _tempered({name: sum(inside.values()) for name, inside in by_language.items()}, language_alpha)
    within = {name: _tempered(inside, dataset_alpha) for name, inside in by_language.items()}
    return {(language, dataset): across[language] * within[language][dataset] for language, dataset in hours}


def _tempered(hours: Mapping[str, float], alpha: float) -> dict[str, float]:
    weight = {name: amount**alpha for name, amount in hours.items()}
    total = sum(weight.values())
    return {name: w / total for name, w in weight.items()}


@dataclass(frozen=True)
class ShareRow:
    """One bucket's line in the table of shares. natural: its share of all hours. target: of what is drawn."""

    language: str
    dataset: str
    utterances: int
    hours: float
    natural: float
    target: float

    @property
    def boost(self) -> float:
        """How many times more often than its natural share the bucket is drawn."""
        return self.target / self.natural


def share_rows(
    utterances: Iterable[Utterance],
    *,
    language_alpha: float = LANGUAGE_ALPHA,
    dataset_alpha: float = DATASET_ALPHA,
) -> list[ShareRow]:
    """Return one row per (language, dataset) of `utterances`, sorted by name."""
    count: dict[Bucket, int] = defaultdict(int)
    hours: dict[Bucket, float] = defaultdict(float)
    for utterance in utterances:
        bucket = utterance.language, utterance.dataset
        count[bucket] += 1
        hours[bucket] += utterance.duration / 3600
    target = target_shares(hours, language_alpha=language_alpha, dataset_alpha=dataset_alpha)
    total = sum(hours.values())
    return [ShareRow(*b, count[b], hours[b], hours[b] / total, target[b]) for b in sorted(hours)]


def render_shares(rows: Iterable[ShareRow]) -> str:
    """Return the table that `whisfusion train --dry-run` prints."""
    header = ("language", "dataset", "utterances", "hours", "natural %", "target %", "boost")
    return text_table(
        header,
        [
            (
                row.language,
                row.dataset,
                f"{row.utterances:,}",
                f"{row.hours:,.1f}",
                f"{100 * row.natural:.1f}",
                f"{100 * row.target:.1f}",
                f"{row.boost:.2f}x",
            )
            for row in rows
        ],
    )
