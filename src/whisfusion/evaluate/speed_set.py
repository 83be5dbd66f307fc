"""The clips that speed is measured on: as many short as long ones, as in the paper's protocol.

Six bins of five seconds hold 56 clips each. A bin that the manifests cannot fill is filled with clips joined one after
another; without manifests the set is made up, with the same durations.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.errors import OptionError

BINS = 6
BIN_SECONDS = 5.0
PER_BIN = 56
MEAN_SECONDS, MEAN_TOLERANCE = 14.7, 0.1
_WORDS_PER_SECOND = 2.7
_TRIES = 20_000
_SHORTEST = 0.5

Pieces = tuple[Utterance, ...]


@dataclass(frozen=True)
class SpeedClip:
    """A clip and what is said in it."""

    samples: np.ndarray
    text: str
    language: str

    @property
    def seconds(self) -> float:
        """Its duration."""
        return len(self.samples) / SAMPLE_RATE


def choose(utterances: Sequence[Utterance], *, per_bin: int = PER_BIN, seed: int = 0) -> list[Pieces]:
    """Clips for each bin, shortest bin first: each one utterance, or several to be joined.

    Their mean duration is 14.7 s to a tenth. Raises OptionError where the manifests cannot give that.
    """
    rng = random.Random(seed)
    usable = [u for u in utterances if _SHORTEST <= u.duration < BINS * BIN_SECONDS and u.text.strip()]
    if not usable:
        raise OptionError("the manifests hold no utterance of 0.5 to 30 s with a text")
    by_bin: list[list[Utterance]] = [[u for u in usable if _bin(u.duration) == number] for number in range(BINS)]
    chosen: list[list[Pieces]] = []
    for number, here in enumerate(by_bin):
        rng.shuffle(here)
        singles: list[Pieces] = [(u,) for u in here[:per_bin]]
        chosen.append(singles + [_join(usable, number, rng) for _ in range(per_bin - len(singles))])

    # A bin's clips may be short or long ones of it: exchange some until the mean is right.
    total, count = sum(_seconds(pieces) for part in chosen for pieces in part), BINS * per_bin
    for _ in range(_TRIES):
        if abs(total / count - MEAN_SECONDS) <= MEAN_TOLERANCE / 2:
            break
        number, place = rng.randrange(BINS), rng.randrange(per_bin)
        taken = {piece.id for pieces in chosen[number] for piece in pieces}
        spare = [u for u in by_bin[number] if u.id not in taken]
        other: Pieces = (rng.choice(spare),) if spare else _join(usable, number, rng)
        change = _seconds(other) - _seconds(chosen[number][place])
        if abs(total + change - MEAN_SECONDS * count) < abs(total - MEAN_SECONDS * count):
            chosen[number][place] = other
            total += change
    if abs(total / count - MEAN_SECONDS) > MEAN_TOLERANCE:
        raise OptionError(f"the mean duration is {total / count:.2f} s, not {MEAN_SECONDS}: give other manifests")
    return [pieces for part in chosen for pieces in part]


def load(chosen: Sequence[Pieces]) -> list[SpeedClip]:
    """Decode what was chosen, and join what is to be joined."""

    def clip(pieces: Pieces) -> SpeedClip:
        samples = np.concatenate([load_samples(piece) for piece in pieces])
        text = " ".join(piece.text.strip() for piece in pieces)
        return SpeedClip(samples[: int(BINS * BIN_SECONDS) * SAMPLE_RATE], text, pieces[0].language)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(clip, chosen))


def made_up(*, per_bin: int = PER_BIN, seed: int = 0) -> list[SpeedClip]:
    """Noise of the same durations, and texts as long as speech of that duration has."""
    rng = np.random.default_rng(seed)
    span = 2 * (MEAN_SECONDS - 0.05 - BIN_SECONDS * (BINS - 1) / 2)
    clips = []
    for number in range(BINS):
        for place in range(per_bin):
            seconds = number * BIN_SECONDS + 0.05 + span * (place + 0.5) / per_bin
            samples = rng.normal(0, 0.1, round(seconds * SAMPLE_RATE)).astype(np.float32)
            words = rng.choice(_WORDS, max(1, round(seconds * _WORDS_PER_SECOND)))
            clips.append(SpeedClip(samples, " ".join(words), "en"))
    return clips


def misheard(text: str, rng: random.Random, *, rate: float = 0.1) -> str:
    """`text` with so many of its words replaced, left out or followed by another."""
    heard = []
    for word in text.split():
        other = rng.choice(_WORDS)
        kinds: list[Callable[[], list[str]]] = [lambda o=other: [o], list, lambda w=word, o=other: [w, o]]
        heard += rng.choice(kinds)() if rng.random() < rate else [word]
    return " ".join(heard)


def _bin(seconds: float) -> int:
    return int(seconds // BIN_SECONDS)


def _seconds(pieces: Pieces) -> float:
    return sum(piece.duration for piece in pieces)


def _join(usable: Sequence[Utterance], number: int, rng: random.Random) -> Pieces:
    """Utterances of one language that together last as long as a clip of the bin."""
    for _ in range(_TRIES):
        pieces: Pieces = (rng.choice(usable),)
        while _seconds(pieces) < number * BIN_SECONDS:
            pieces += (rng.choice(usable),)
        if _bin(_seconds(pieces)) == number and len({piece.language for piece in pieces}) == 1:
            return pieces
    low, high = number * BIN_SECONDS, (number + 1) * BIN_SECONDS
    raise OptionError(f"the manifests have no clips of {low:g} to {high:g} s, nor any that join to that")


_COMMON = (
    "the of and to a in that it was his he with as for had you not be her is but on at all by she they so from this "
    "which one said we or have there my when were them me an him would their been more no out if will your some what "
    "up two then into could like time about man now little other upon very do its than who only over here has old "
    "again great come made well before never such must day good after down house first way long where came thing hand "
    "think people own might back world know through life place still much night under work right water light head "
    "door year young round nothing country father mother morning voice friend always small white black city"
)
_WORDS = _COMMON.split()
