"""Clips that were made, not recorded, into tar shards and a manifest beside them."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.manifest import Utterance, write_manifest
from whisfusion.data.pack import encode_opus
from whisfusion.data.shard import write_shard

Coding = Literal["flac", "wav", "opus"]
"""How samples lie in a shard: FLAC is exact, half of WAV's size and decodes as fast as a disk reads; Opus a tenth."""
CODINGS: tuple[Coding, ...] = get_args(Coding)
_CLIPS_PER_SHARD = 3000


@dataclass(frozen=True, slots=True)
class MadeClip:
    """A clip to be written. content: the bytes of a sound file. seconds: how long it lasts."""

    content: bytes
    seconds: float
    text: str
    language: str
    speaker: str = ""


def encode(samples: np.ndarray, coding: Coding) -> bytes:
    """Return float samples in [-1, 1], 16 kHz mono, as the bytes of a sound file."""
    import soundfile

    if coding == "opus":
        return encode_opus(samples.astype(np.float32))
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, SAMPLE_RATE, format=coding.upper(), subtype="PCM_16")
    return buffer.getvalue()


def write_corpus(
    folder: Path, dataset: str, coding: Coding, clips: Iterable[MadeClip], *, clips_per_shard: int = _CLIPS_PER_SHARD
) -> list[Utterance]:
    """Write `clips` as they come into DATASET-000.tar, DATASET-001.tar ... and then DATASET.jsonl, all in `folder`.

    Clips are numbered in their order, and that is their name: the same clips give the same bytes.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    utterances: list[Utterance] = []
    coming = iter(clips)
    for number in count():
        first = next(coming, None)
        if first is None:
            break
        shard = folder / f"{dataset}-{number:03d}.tar"
        some = chain([first], islice(coming, clips_per_shard - 1))
        write_shard(shard, _members(some, dataset, coding, shard, utterances))
    write_manifest(folder / f"{dataset}.jsonl", utterances)
    return utterances


def _members(
    clips: Iterable[MadeClip], dataset: str, coding: Coding, shard: Path, utterances: list[Utterance]
) -> Iterator[tuple[str, bytes]]:
    for clip in clips:
        name = f"{len(utterances):06d}.{coding}"
        utterances.append(
            Utterance(
                id=f"{dataset}-{len(utterances):06d}",
                audio=name,
                duration=round(clip.seconds, 3),
                text=clip.text,
                language=clip.language,
                speaker=clip.speaker,
                dataset=dataset,
                shard=shard.name,
                root=shard.parent,
            )
        )
        yield name, clip.content
