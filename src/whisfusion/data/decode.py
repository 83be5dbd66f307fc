"""Many clips decoded at once, in processes of their own. No torch here: each of them would have to load it.

Letters: B clips of a group, N samples.
"""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.parallel import LOTS_AHEAD, in_processes, memory_folder
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.errors import AudioError

# Seconds of audio in a group: 32 MB of samples, a second's work for a processor.
_GROUP_SECONDS = 500.0

_Numbered = list[tuple[int, Utterance]]


@dataclass(frozen=True)
class Decoded:
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
    # Through a pipe, samples would take longer than decoding them.
    room = round(LOTS_AHEAD * (workers + 1) * 4 * SAMPLE_RATE * _GROUP_SECONDS)
    with tempfile.TemporaryDirectory(prefix="whisfusion-", dir=memory_folder(room)) as folder:
        for group, file in in_processes(functools.partial(_decode_into, Path(folder)), groups, workers=workers, lot=1):
            yield replace(group, samples_BN=np.load(file))
            file.unlink()


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


def _decode_into(folder: Path, group: _Numbered) -> tuple[Decoded, Path]:
    """A group whose samples are in a file, which is named after its first clip."""
    decoded, file = _decode(group), folder / f"{group[0][0]}.npy"
    np.save(file, decoded.samples_BN)
    return replace(decoded, samples_BN=decoded.samples_BN[:, :0]), file
