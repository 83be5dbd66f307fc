"""Many clips decoded at once, in processes of their own. No torch here: each of them would have to load it.

Letters: B clips of a group, N samples.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.errors import AudioError

# Seconds of audio in a group: 32 MB of samples, a second's work for a processor.
_GROUP_SECONDS = 500.0

_Numbered = list[tuple[int, Utterance]]


class Decoded(NamedTuple):
    """A group of clips side by side, and what could not be read."""

    clips_B: np.ndarray
    """int64: their numbers among the utterances."""
    lengths_B: np.ndarray
    """int64: their samples."""
    samples_BN: np.ndarray
    """float32 at 16 kHz; zero beyond each clip."""
    failures: list[tuple[str, str]]
    """Ids of clips that did not decode, and why."""


def decode_all(utterances: Sequence[Utterance], *, workers: int = 0) -> Iterator[Decoded]:
    """Decode all clips, those of like duration in a group, in `workers` processes (0: in this one)."""
    groups = _groups(utterances)
    if not workers:
        yield from map(_decode, groups)
        return
    # A forked child would inherit locks that this process's threads hold, and its hold on the GPU.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_decode, groups)


def _groups(utterances: Sequence[Utterance]) -> list[_Numbered]:
    groups: list[_Numbered] = []
    room = 0.0
    # The longest first: a process that gets the last group does not keep the others waiting long.
    for number, utterance in sorted(enumerate(utterances), key=lambda item: -item[1].duration):
        if utterance.duration > room:
            groups.append([])
            room = _GROUP_SECONDS
        groups[-1].append((number, utterance))
        room -= utterance.duration
    return groups


def _decode(group: _Numbered) -> Decoded:
    decoded: dict[int, np.ndarray] = {}
    failures = []
    for number, utterance in group:
        try:
            decoded[number] = load_samples(utterance)
        except AudioError as error:
            failures.append((utterance.id, str(error)))
    lengths_B = np.array([len(samples) for samples in decoded.values()], dtype=np.int64)
    samples_BN = np.zeros((len(decoded), lengths_B.max(initial=0)), dtype=np.float32)
    for row_N, samples in zip(samples_BN, decoded.values(), strict=True):
        row_N[: len(samples)] = samples
    return Decoded(np.array(list(decoded), dtype=np.int64), lengths_B, samples_BN, failures)
