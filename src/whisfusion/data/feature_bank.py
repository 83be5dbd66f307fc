"""What the frozen parts of a model hear in every clip: computed once, kept on disk, and indexed by training steps.

`features.f16` holds the positions of all clips in a line, `features.jsonl` where each clip's are. Both grow clip by
clip, so that a run which was stopped goes on where it was.

Letters: N positions of the bank, D width, T positions of a clip, C clips.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.bank import Bank
from whisfusion.data.batch import Failure
from whisfusion.data.filters import Progress
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.errors import AudioError, OptionError
from whisfusion.mel import MAX_SAMPLES

Listen = Callable[[np.ndarray], Tensor]
"""Samples of one clip to what is heard in it (T, D)."""


def build_feature_bank(
    utterances: Sequence[Utterance],
    listen: Listen,
    folder: Path,
    *,
    model: str,
    width: int,
    per_second: int,
    progress: Progress | None = None,
) -> Bank:
    """Hear what `folder` does not have yet of the utterances, and return the bank of all of them.

    model: what tells the model that hears from others. per_second: positions of a second. `progress` is told of clips.
    Raises OptionError where the folder holds what another model heard.
    """
    _check_names(utterances)
    kept = _Kept(folder, {"model": model, "width": width})
    failures = []
    with kept.growing() as append:
        for number, utterance in enumerate(utterances, 1):
            if kept.place(utterance) is None:
                try:
                    samples = load_samples(utterance)
                    _check_length(samples)
                    append(utterance, listen(samples), len(samples))
                except AudioError as error:
                    failures.append(Failure(utterance.id, str(error)))
            if progress is not None:
                progress(number, len(utterances))
    heard = [(utterance, place) for utterance in utterances if (place := kept.place(utterance)) is not None]
    firsts, counts, samples = np.array([place for _, place in heard], dtype=np.int64).reshape(-1, 3).T
    return Bank(
        frames_NM=kept.positions(),
        speeds=(1.0,),
        utterances=tuple(replace(u, duration=n / SAMPLE_RATE) for (u, _), n in zip(heard, samples, strict=True)),
        firsts_VC=firsts[None],
        counts_VC=counts[None],
        # Nothing is cut off: there is no floor.
        peaks_VC=np.full((1, len(heard)), -np.inf, dtype=np.float32),
        failures=tuple(failures),
        per_second=per_second,
    )


def _check_names(utterances: Sequence[Utterance]) -> None:
    """What is heard is kept by dataset and id: one name must not stand for two clips."""
    clips: dict[str, tuple[str, float | None]] = {}
    for utterance in utterances:
        clip = (utterance.audio_path, utterance.start)
        if clips.setdefault(_name(utterance), clip) != clip:
            raise OptionError(f"two clips are called {_name(utterance)}: give them ids, or datasets, of their own")


def _check_length(samples: np.ndarray) -> None:
    if len(samples) > MAX_SAMPLES:
        raise AudioError(f"lasts {len(samples) / SAMPLE_RATE:.1f} s: cut it into windows of at most 30 s")


class _Kept:
    """The two files."""

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._positions, self._index = folder / "features.f16", folder / "features.jsonl"
        self._head, self._bytes = head, 2 * head["width"]
        self._places: dict[str, tuple[int, int, int]] = {}
        # Position 0 is zeros: what lies beyond a clip.
        self._end = 1
        if not self._index.exists():
            self._positions.write_bytes(bytes(self._bytes))
            self._index.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return
        lines = self._index.read_text(encoding="utf-8").splitlines(keepends=True)
        if not lines or not lines[0].endswith("\n") or json.loads(lines[0]) != head:
            raise OptionError(f"{folder} holds what another model heard: remove it, or choose another folder")
        there = self._positions.stat().st_size // self._bytes if self._positions.exists() else 0
        whole = [lines[0]]
        for line in lines[1:]:
            # What a stop cut short is heard again.
            if not line.endswith("\n"):
                break
            record = json.loads(line)
            first, count, _ = place = tuple(record["place"])
            if first + count > there:
                break
            self._places[record["clip"]] = place
            self._end = max(self._end, first + count)
            whole.append(line)
        if len(whole) < len(lines):
            self._index.write_text("".join(whole), encoding="utf-8")

    def place(self, utterance: Utterance) -> tuple[int, int, int] | None:
        """A clip's first position, how many it has, and its samples; None where it was not heard."""
        return self._places.get(_name(utterance))

    def growing(self) -> "_Growing":
        """Files that clips can be added to."""
        return _Growing(self, self._positions, self._index)

    def add(self, utterance: Utterance, count: int, samples: int) -> str:
        """Take note of the next clip; returns its line."""
        place = self._places[_name(utterance)] = (self._end, count, samples)
        self._end += count
        return json.dumps({"clip": _name(utterance), "place": place}, ensure_ascii=False) + "\n"

    @property
    def end_byte(self) -> int:
        """Where the next clip begins."""
        return self._end * self._bytes

    def positions(self) -> Tensor:
        """All of them (N, D), read from the disk when they are asked for."""
        # Copied when written to, which nobody does: torch wants to be allowed.
        line = np.memmap(self._positions, dtype=np.float16, mode="c")
        return torch.from_numpy(line.reshape(-1, self._head["width"]))


class _Growing:
    """Adds clips: positions first, then the line that names them."""

    def __init__(self, kept: _Kept, positions: Path, index: Path) -> None:
        self._kept = kept
        positions.touch()
        self._positions, self._index = positions.open("r+b"), index.open("a", encoding="utf-8")
        self._positions.truncate(kept.end_byte)
        self._positions.seek(kept.end_byte)

    def __enter__(self) -> Callable[[Utterance, Tensor, int], None]:
        return self._append

    def __exit__(self, *_: object) -> None:
        self._positions.close()
        self._index.close()

    def _append(self, utterance: Utterance, heard_TD: Tensor, samples: int) -> None:
        self._positions.write(heard_TD.to(torch.float16).cpu().numpy().tobytes())
        self._positions.flush()
        self._index.write(self._kept.add(utterance, len(heard_TD), samples))


def _name(utterance: Utterance) -> str:
    return f"{utterance.dataset}/{utterance.id}"
