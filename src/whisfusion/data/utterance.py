"""One clip of speech and what is said in it, and the way to its samples."""

import io
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from whisfusion.data.shard import read_member, shard_index
from whisfusion.errors import AudioError


@dataclass(frozen=True, slots=True)
class Utterance:
    """One clip of speech and what is said in it. All durations in seconds.

    id: unique in a corpus. audio: a file, relative to `root` unless absolute, or a member's name in `shard`.
    text: as the corpus writes it. speaker, dataset: "" and the manifest's name where not given.
    shard: a tar file, relative to `root` unless absolute. start: where the clip begins in `audio`; None means
    that the clip is the whole of it. extra: fields we do not know, kept. root: the manifest's own folder.
    """

    id: str
    audio: str
    duration: float
    text: str
    language: str
    speaker: str = ""
    dataset: str = ""
    shard: str | None = None
    start: float | None = None
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    root: Path = Path()

    @property
    def file(self) -> str:
        """The absolute path of the file to open: the shard, or the audio file itself."""
        return os.path.normpath(os.path.join(self.root, self.shard or self.audio))

    @property
    def audio_path(self) -> str:
        """The audio's absolute path as blacklists name it: a member of a shard is `SHARD.tar/MEMBER`."""
        return self.file if self.shard is None else f"{self.file}/{self.audio}"


def relocate(utterance: Utterance, root: Path) -> Utterance:
    """Return the same utterance with `root` as its folder: path relative if it lies there, else absolute."""
    if utterance.root == root and not os.path.isabs(utterance.shard or utterance.audio):
        return utterance
    file = Path(utterance.file)
    place = str(file.relative_to(root) if file.is_relative_to(root) else file)
    if utterance.shard is None:
        return replace(utterance, audio=place, root=root)
    return replace(utterance, shard=place, root=root)


def load_samples(utterance: Utterance) -> np.ndarray:
    """Return the utterance's sound: float32, 16 kHz, mono, 1-D. Safe in threads and forked workers.

    Raises AudioError, naming the utterance, where its shard or file is missing or does not decode.
    """
    from whisfusion.audio import load_audio

    with _named(utterance):
        source = read_member(utterance.file, utterance.audio) if utterance.shard else utterance.file
        if utterance.start is None:
            return load_audio(source)
        return _load_span(source, utterance.start, utterance.duration)


def missing_audio(utterances: Iterable[Utterance]) -> list[str]:
    """Return a sentence for every shard, shard member and file that is not there, each shard opened once."""
    problems: dict[str, None] = {}
    for utterance in utterances:
        if utterance.shard is None:
            if not os.path.isfile(utterance.file):
                problems[f"{utterance.id}: the file {utterance.file} does not exist"] = None
            continue
        try:
            if shard_index(utterance.file).find(utterance.audio) is None:
                problems[f"{utterance.id}: the shard {utterance.file} has no member {utterance.audio}"] = None
        except AudioError as error:
            problems[str(error)] = None
    return list(problems)


def _load_span(source: str | bytes, start: float, duration: float) -> np.ndarray:
    """Decode only [start, start + duration) where the format can seek; otherwise decode all and cut."""
    import soundfile

    from whisfusion.audio import SAMPLE_RATE, load_audio

    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as sound:
            rate, total = sound.samplerate, sound.frames
            sound.seek(min(round(start * rate), total))
            samples = sound.read(round(duration * rate), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError):
        rate, whole = SAMPLE_RATE, load_audio(source)
        total = len(whole)
        samples = whole[round(start * rate) :][: round(duration * rate), None]
    if not len(samples):
        raise AudioError(f"the clip starts at {start:g} s, but its audio is {total / rate:g} s long")
    return load_audio(samples.mean(axis=1), sample_rate=rate)


@contextmanager
def _named(utterance: Utterance) -> Generator[None]:
    try:
        yield
    except (AudioError, OSError) as error:
        raise AudioError(f"{utterance.id}: {error}") from error
