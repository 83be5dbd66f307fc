"""The plan of one epoch: which clips are drawn, joined, sped up, and put together into steps.

Pure functions of a corpus, the options and the epoch's number. Letters of array shapes: N clips of the
corpus, C clips drawn in the epoch, D draws (of one clip or more), R rows of all steps in a line, S steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from whisfusion.data.shares import DATASET_ALPHA, LANGUAGE_ALPHA
from whisfusion.errors import OptionError
from whisfusion.tokenizer import PROMPT_LENGTH

Positions = Callable[[float], int]
"""Seconds of an utterance -> positions of its canvas, prompt and endoftext included (`Canvas.positions`)."""

# Streams of random numbers that must not meet.
_WALK, _JOIN, _SPEED, _DRAWS, _STEPS = range(5)


@dataclass(frozen=True)
class SamplerOptions:
    """How steps are made. Exactly one of `utterances` and `seconds` says how large a step is."""

    utterances: int | None = None
    """Draws in a step over all ranks; draws of like duration are put together."""
    seconds: float | None = None
    """Seconds of audio in a step over all ranks, padding included; each step has one of `shapes`."""
    shapes: tuple[float, ...] = (4.0, 6.0, 8.0, 11.0, 16.0, 30.0)
    """Windows in seconds, rising; a draw goes into the shortest that holds it. None may exceed the last."""
    rows_multiple: int = 8
    """With `seconds`, a step's rows are rounded down to a multiple of this: of ranks times micro-batches."""
    pool: int = 64
    """With `utterances`, draws are sorted by duration inside pools of this many steps."""
    language_alpha: float = LANGUAGE_ALPHA
    """Temperature exponent over languages."""
    dataset_alpha: float = DATASET_ALPHA
    """Temperature exponent over the datasets of a language."""
    join: float = 0.0
    """Share of the draws that try to join several clips of one bucket into a longer utterance."""
    join_most: int = 4
    """The most clips in a joined draw; the fewest is two."""
    join_seconds: float = 29.0
    """A joined draw is at most this long: clips beyond it become draws of their own."""
    speeds: tuple[float, ...] = (1.0,)
    """Speeds to draw from evenly; a draw that would no longer fit its window or canvas keeps speed 1."""
    margin: float = 0.0
    """Seconds of silence that the window adds to a clip, counted when its shape is chosen."""
    seed: int = 42
    """Everything random follows from it."""

    def __post_init__(self) -> None:
        """Report every option that is out of range."""
        problems = []
        if (self.utterances is None) == (self.seconds is None):
            problems.append("give the size of a step as one of `utterances` and `seconds`")
        if self.utterances is not None and self.utterances < 1:
            problems.append(f"`utterances` must be at least 1, not {self.utterances}")
        if not self.shapes or list(self.shapes) != sorted(set(self.shapes)) or self.shapes[0] <= 0:
            problems.append(f"`shapes` must be rising seconds, not {self.shapes}")
        elif self.rows_multiple < 1:
            problems.append(f"`rows_multiple` must be at least 1, not {self.rows_multiple}")
        elif self.seconds is not None and self.seconds < self.shapes[-1] * self.rows_multiple:
            problems.append(f"`seconds` must hold {self.rows_multiple} rows of {self.shapes[-1]:g} s")
        if self.pool < 1:
            problems.append(f"`pool` must be at least 1 step, not {self.pool}")
        if self.language_alpha < 0 or self.dataset_alpha < 0:
            problems.append("`language_alpha` and `dataset_alpha` must not be negative")
        if not 0 <= self.join <= 1:
            problems.append(f"`join` is a share between 0 and 1, not {self.join}")
        if self.join_most < 2:
            problems.append(f"`join_most` must be at least 2 clips, not {self.join_most}")
        if self.shapes and self.join and self.join_seconds > self.shapes[-1]:
            problems.append(f"`join_seconds` must fit the longest window of {self.shapes[-1]:g} s")
        if not self.speeds or min(self.speeds) <= 0:
            problems.append(f"`speeds` must be positive, not {self.speeds}")
        if self.margin < 0:
            problems.append(f"`margin` must not be negative, not {self.margin}")
        if self.seed < 0:
            problems.append(f"`seed` must not be negative, not {self.seed}")
        OptionError.collect(problems)


class Draw(NamedTuple):
    """One training utterance: clips to be joined in order, at a speed, and its seconds after both."""

    clips: tuple[int, ...]
    speed: float
    seconds: float


@dataclass(frozen=True)
class Corpus:
    """What there is to draw from.

    buckets: clip numbers of each bucket. quotas: clips that an epoch takes of each. seconds_N: durations.
    tokens_N, positions: text lengths and canvases; without them text is no bound on joining and speed.
    """

    buckets: list[np.ndarray]
    quotas: list[int]
    seconds_N: np.ndarray
    tokens_N: np.ndarray
    positions: Positions | None = None

    def text_fits(self, tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Return whether so many text tokens have room on the canvas of so many seconds, for each pair."""
        if self.positions is None:
            return np.ones(len(tokens), dtype=bool)
        canvas = np.fromiter(map(self.positions, seconds.tolist()), dtype=np.int64, count=len(seconds))
        return PROMPT_LENGTH + tokens + 1 <= canvas


@dataclass(frozen=True)
class EpochPlan:
    """Draw d joins the clips clips_C[firsts[d]:firsts[d + 1]] at speed_D[d] and lasts seconds_D[d].

    Step s holds the draws order_R[starts[s]:starts[s + 1]], each in a window of windows_S[s] seconds.
    """

    clips_C: np.ndarray
    firsts: np.ndarray
    speed_D: np.ndarray
    seconds_D: np.ndarray
    order_R: np.ndarray
    starts: np.ndarray
    windows_S: np.ndarray

    def draw(self, number: int) -> Draw:
        """Return draw `number` of the epoch."""
        clips = self.clips_C[self.firsts[number] : self.firsts[number + 1]]
        return Draw(tuple(clips.tolist()), float(self.speed_D[number]), float(self.seconds_D[number]))


def plan_epoch(corpus: Corpus, options: SamplerOptions, epoch: int) -> EpochPlan:
    """Plan epoch number `epoch` (from 0)."""
    walks = [
        walk(clips, quota, epoch, seed=(options.seed, _WALK, bucket))
        for bucket, (clips, quota) in enumerate(zip(corpus.buckets, corpus.quotas, strict=True))
    ]
    opens = [
        join(clips, corpus, options, rng=_rng(options.seed, _JOIN, bucket, epoch)) for bucket, clips in enumerate(walks)
    ]
    clips_C = np.concatenate(walks)
    firsts = np.append(np.flatnonzero(np.concatenate(opens)), len(clips_C))
    seconds_D = np.add.reduceat(corpus.seconds_N[clips_C], firsts[:-1])
    tokens_D = np.add.reduceat(corpus.tokens_N[clips_C], firsts[:-1])
    speed_D = choose_speeds(seconds_D, tokens_D, corpus, options, rng=_rng(options.seed, _SPEED, epoch))
    seconds_D = seconds_D / speed_D
    draws_D = _rng(options.seed, _DRAWS, epoch).permutation(len(seconds_D))
    group = by_duration if options.seconds is None else by_shape
    order_R, starts, windows_S = group(draws_D, seconds_D, options)
    # Steps come out by duration: shuffle them, and their rows with them.
    steps_S = _rng(options.seed, _STEPS, epoch).permutation(len(windows_S))
    rows = np.diff(starts)[steps_S]
    order_R = np.concatenate([order_R[starts[step] : starts[step + 1]] for step in steps_S])
    return EpochPlan(clips_C, firsts, speed_D, seconds_D, order_R, np.append(0, np.cumsum(rows)), windows_S[steps_S])


def walk(clips: np.ndarray, quota: int, epoch: int, *, seed: tuple[int, ...]) -> np.ndarray:
    """Return the `quota` clips that epoch number `epoch` takes from an endless walk through a bucket.

    The walk is one random order of the bucket after the other; epochs follow each other on it.
    """
    place, end = quota * epoch, quota * (epoch + 1)
    taken = []
    while place < end:
        lap, inside = divmod(place, len(clips))
        order = _rng(*seed, lap).permutation(clips)
        taken.append(order[inside : inside + end - place])
        place += len(taken[-1])
    return np.concatenate(taken)


def join(clips: np.ndarray, corpus: Corpus, options: SamplerOptions, *, rng: np.random.Generator) -> np.ndarray:
    """Return for each of a bucket's drawn clips whether it opens a draw; the others join the one before.

    A share `options.join` of the draws tries for 2 to `join_most` clips. Where the next clip would make one
    too long, in seconds or in text, it and those that were to follow become draws of their own.
    """
    count = len(clips)
    if not options.join:
        return np.ones(count, dtype=bool)
    several = rng.random(count) < options.join
    wanted = np.where(several, rng.integers(2, options.join_most + 1, count), 1)
    opens = np.zeros(count, dtype=bool)
    starts = np.append(0, np.cumsum(wanted)[:-1])
    opens[starts[starts < count]] = True
    seconds = _running_sum(corpus.seconds_N[clips], opens)
    fits = corpus.text_fits(_running_sum(corpus.tokens_N[clips], opens), seconds)
    too_long = (seconds > options.join_seconds) | ~fits
    return opens | (_running_sum(too_long & ~opens, opens) > 0)


def choose_speeds(
    seconds_D: np.ndarray,
    tokens_D: np.ndarray,
    corpus: Corpus,
    options: SamplerOptions,
    *,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return a speed for each draw: one of `options.speeds`, or 1 where that one would not fit."""
    if options.speeds == (1.0,):
        return np.ones(len(seconds_D))
    speed_D = np.array(options.speeds)[rng.integers(0, len(options.speeds), len(seconds_D))]
    sped_D = seconds_D / speed_D
    fits = (sped_D + options.margin <= options.shapes[-1]) & corpus.text_fits(tokens_D, sped_D)
    return np.where(fits, speed_D, 1.0)


def by_duration(
    draws_D: np.ndarray, seconds_D: np.ndarray, options: SamplerOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put draws into steps of `options.utterances`, sorted by duration inside pools of steps.

    The last step is filled up with draws of the epoch's beginning, so that every step is full and no draw is
    lost. Returns the draws in step order, where each step starts and the longest draw of each.
    """
    rows = options.utterances or 1
    steps = -(-len(draws_D) // rows)
    draws_R = np.resize(draws_D, steps * rows)
    pools = np.split(draws_R, range(rows * options.pool, len(draws_R), rows * options.pool))
    order_R = np.concatenate([pool[np.argsort(seconds_D[pool], kind="stable")] for pool in pools])
    windows_S = seconds_D[order_R].reshape(steps, rows).max(axis=1) + options.margin
    return order_R, np.arange(steps + 1) * rows, np.minimum(windows_S, options.shapes[-1])


def by_shape(
    draws_D: np.ndarray, seconds_D: np.ndarray, options: SamplerOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put draws into steps of one shape each, every one filled to `options.seconds`.

    What does not fill a step of its shape goes into the next longer shape in use; the last step of the
    longest is filled up with draws from the epoch's beginning. Returns what `by_duration` does.
    """
    shapes = np.array(options.shapes)
    shape_D = np.minimum(np.searchsorted(shapes, seconds_D[draws_D] + options.margin), len(shapes) - 1)
    in_use = np.unique(shape_D)
    waiting = draws_D[:0]
    order, sizes, windows = [], [], []
    for shape in in_use:
        rows = rows_of(float(shapes[shape]), options)
        waiting = np.concatenate([waiting, draws_D[shape_D == shape]])
        if shape == in_use[-1]:
            missing = -len(waiting) % rows
            waiting = np.concatenate([waiting, np.resize(draws_D, missing)])
        steps = len(waiting) // rows
        order.append(waiting[: steps * rows])
        waiting = waiting[steps * rows :]
        sizes += [rows] * steps
        windows += [shapes[shape]] * steps
    return np.concatenate(order), np.append(0, np.cumsum(sizes)), np.array(windows)


def rows_of(shape: float, options: SamplerOptions) -> int:
    """Return how many rows a step of `shape` seconds has, over all ranks."""
    return int((options.seconds or 0) / shape) // options.rows_multiple * options.rows_multiple


def _running_sum(values: np.ndarray, opens: np.ndarray) -> np.ndarray:
    """Return the running sum of `values`, from 0 again wherever `opens` is true (as it is at the start)."""
    total = np.cumsum(values)
    before = (total - values)[opens]
    return total - np.repeat(before, np.diff(np.append(np.flatnonzero(opens), len(opens))))


def _rng(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
