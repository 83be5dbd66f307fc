"""What is heard when: which clips make up each training step, the same on every machine and after every stop.

An epoch draws as many clips as there are. Each (language, dataset) bucket gets its share of them (shares.py)
to within one draw, and is walked through in a random order, then in another, on and on over the epochs: no
clip of a bucket is heard twice before all were heard once. Independent draws by weight, which the paper's
words suggest, have the same shares in the long run, but leave a clip unheard with probability 1/e where a
bucket is drawn its own size.

Nothing is remembered between steps: a step follows from the seed, the options and its place (epoch, step), so
resuming costs the planning of one epoch. Steps are planned for all ranks together, and a rank takes every
world-th row: the number of ranks changes nothing about what a step holds.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from whisfusion.data.epoch import Corpus, Draw, EpochPlan, Positions, SamplerOptions, plan_epoch
from whisfusion.data.manifest import Utterance
from whisfusion.data.shares import Bucket, target_shares
from whisfusion.errors import OptionError


class Place(NamedTuple):
    """A step of the run: step `step` (from 0) of epoch `epoch` (from 0)."""

    epoch: int
    step: int


START = Place(0, 0)


@dataclass(frozen=True)
class DrawnStep:
    """What one rank sees in one step.

    draws: this rank's. rows: their row numbers in the step over all ranks, for random numbers that do not
    depend on the number of ranks. total_rows: rows of the step over all ranks. window: seconds that hold any
    draw of the step (one of `shapes`, or the longest draw), the same on all ranks. next: where to go on.
    """

    place: Place
    next: Place
    draws: tuple[Draw, ...]
    rows: tuple[int, ...]
    total_rows: int
    window: float

    def split(self, parts: int) -> list["DrawnStep"]:
        """Return `parts` micro-batches of the same number of rows, of like durations."""
        if len(self.draws) % parts:
            raise OptionError(f"{len(self.draws)} draws do not split into {parts} equal micro-batches")
        return [replace(self, draws=self.draws[i::parts], rows=self.rows[i::parts]) for i in range(parts)]


class Sampler:
    """The steps of one rank, without end. Pure: any step can be asked for at any time."""

    def __init__(
        self,
        utterances: Sequence[Utterance],
        options: SamplerOptions,
        *,
        rank: int = 0,
        world: int = 1,
        tokens_N: np.ndarray | None = None,
        positions: Positions | None = None,
    ) -> None:
        """Plan steps over `utterances`; draws name them by their index.

        tokens_N: text tokens of each utterance; positions: the canvas of so many seconds, `Canvas.positions`.
        With both, clips are joined and sped up only as far as their text still fits.
        Raises OptionError where the options, the utterances and the number of ranks do not fit together.
        """
        self.options = options
        self.rank, self.world = rank, world
        members: dict[Bucket, list[int]] = defaultdict(list)
        for index, utterance in enumerate(utterances):
            members[utterance.language, utterance.dataset].append(index)
        seconds_N = np.array([u.duration for u in utterances], dtype=np.float64)
        self._check(seconds_N, tokens_N, positions)
        hours = {bucket: float(seconds_N[members[bucket]].sum()) / 3600 for bucket in sorted(members)}
        shares = target_shares(hours, language_alpha=options.language_alpha, dataset_alpha=options.dataset_alpha)
        self.draws_per_epoch = apportion(shares, len(utterances))
        """Clips of each (language, dataset) that an epoch hears; they sum to the number of utterances."""
        self._corpus = Corpus(
            buckets=[np.array(members[bucket], dtype=np.int64) for bucket in shares],
            quotas=list(self.draws_per_epoch.values()),
            seconds_N=seconds_N,
            tokens_N=np.zeros(len(utterances), dtype=np.int64) if tokens_N is None else tokens_N,
            positions=positions,
        )
        self._planned: tuple[int, EpochPlan] | None = None
        self._fingerprint = self._hash()

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Return the number of steps in an epoch, the same on every rank."""
        return len(self.plan(epoch).windows_S)

    def padding(self, epoch: int = 0) -> float:
        """Return the share of an epoch's windows that is padding: 0 is none."""
        plan = self.plan(epoch)
        return 1 - float(plan.seconds_D[plan.order_R].sum() / (plan.windows_S * np.diff(plan.starts)).sum())

    def steps_from(self, place: Place = START) -> Iterator[DrawnStep]:
        """Yield this rank's steps from `place` on, epoch after epoch, without end."""
        while True:
            step = self.step(place)
            yield step
            place = step.next

    def step(self, place: Place) -> DrawnStep:
        """Return this rank's part of the step at `place`. Raises IndexError past the epoch's last step."""
        plan = self.plan(place.epoch)
        if not 0 <= place.step < len(plan.windows_S):
            raise IndexError(f"epoch {place.epoch} has {len(plan.windows_S)} steps, not a step {place.step}")
        first, last = int(plan.starts[place.step]), int(plan.starts[place.step + 1])
        rows = range(self.rank, last - first, self.world)
        is_last = place.step + 1 == len(plan.windows_S)
        return DrawnStep(
            place=place,
            next=Place(place.epoch + 1, 0) if is_last else Place(place.epoch, place.step + 1),
            draws=tuple(plan.draw(int(plan.order_R[first + row])) for row in rows),
            rows=tuple(rows),
            total_rows=last - first,
            window=float(plan.windows_S[place.step]),
        )

    def state_dict(self, place: Place) -> dict[str, Any]:
        """Return what a checkpoint keeps of `place`, the `next` of the last step trained on. Plain JSON."""
        return {"epoch": place.epoch, "step": place.step, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> Place:
        """Return the place in `state`. Raises OptionError where the data or the options are not the same."""
        if state["fingerprint"] != self._fingerprint:
            raise OptionError(
                "the training data or the sampler's options are not those of the checkpoint, so its place in "
                "them means nothing: resume with the same ones, or start anew from its weights alone"
            )
        return Place(state["epoch"], state["step"])

    def plan(self, epoch: int) -> EpochPlan:
        """All steps of an epoch, as arrays; the last one asked for is kept."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, plan_epoch(self._corpus, self.options, epoch)
        return self._planned[1]

    def _check(self, seconds_N: np.ndarray, tokens_N: np.ndarray | None, positions: Positions | None) -> None:
        options, problems = self.options, []
        longest = options.shapes[-1]
        if not len(seconds_N):
            problems.append("there are no utterances to train on: look at what the filters dropped")
        elif seconds_N.max() > longest:
            count = int((seconds_N > longest).sum())
            problems.append(f"{count} utterances are longer than {longest:g} s: filter them out")
        if not 0 <= self.rank < self.world:
            problems.append(f"rank {self.rank} is not one of {self.world} ranks")
        rows = options.utterances or options.rows_multiple
        if rows % self.world:
            name = "utterances" if options.utterances else "rows_multiple"
            problems.append(f"`{name}` of {rows} cannot be divided among {self.world} ranks")
        if (tokens_N is None) != (positions is None):
            problems.append("`tokens_N` and `positions` come together")
        if tokens_N is not None and len(tokens_N) != len(seconds_N):
            problems.append(f"{len(tokens_N)} token counts for {len(seconds_N)} utterances")
        OptionError.collect(problems)

    def _hash(self) -> str:
        """Everything that the steps follow from; not the number of ranks, which changes none of them."""
        digest = hashlib.sha256(repr((self.options, self.draws_per_epoch)).encode())
        for array in (*self._corpus.buckets, self._corpus.seconds_N, self._corpus.tokens_N):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def apportion(shares: dict[Bucket, float], draws: int) -> dict[Bucket, int]:
    """Divide `draws` by `shares`, each to within one draw, and at least one to each bucket.

    The largest remainders are rounded up. Raises nothing: there are never more buckets than draws.
    """
    wanted = np.array(list(shares.values())) * draws
    counts = np.maximum(np.floor(wanted).astype(np.int64), 1)
    gap = draws - int(counts.sum())
    by_remainder = np.argsort(counts - wanted, kind="stable")
    if gap > 0:
        counts[by_remainder[:gap]] += 1
    for _ in range(-gap):
        counts[np.argmax(counts)] -= 1
    return dict(zip(shares, counts.tolist(), strict=True))
