"""Transcriber: the object that users hold. Any audio in, transcripts out, whichever system writes them."""

import hashlib
import operator
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal, Protocol, TypedDict, Unpack, overload

import numpy as np
import torch

from whisfusion.audio import SAMPLE_RATE, load_audio
from whisfusion.errors import OptionError
from whisfusion.pdd import PDDOptions, override_options
from whisfusion.speech import windows
from whisfusion.tokenizer import canonical_language
from whisfusion.transcript import Heard, Transcript, join

Audio = str | os.PathLike[str] | bytes | BinaryIO | np.ndarray | torch.Tensor
"""What can be transcribed: a path, "-" for stdin, the bytes of a file, a binary file object, or samples at 16 kHz."""

SelectionName = Literal["mbr", "confidence", "spelling", "rerank", "oracle"]


@dataclass(frozen=True)
class Window:
    """At most 30 s of one file, as a system gets it."""

    samples: np.ndarray
    seed: int
    language: str | None
    reference: str | None = None

    @property
    def seconds(self) -> float:
        """Its duration."""
        return len(self.samples) / SAMPLE_RATE


@dataclass(frozen=True)
class DecodingOptions:
    """Everything about how to transcribe that is not the audio."""

    pdd: PDDOptions
    selection: SelectionName = "mbr"
    trace: bool = False
    proofread: bool | None = None
    """Whether Whisper's decoder corrects what was chosen; None: where it comes with the model, but for the oracle."""
    words: bool = False
    """Whether words are timed."""


def wants_spelling(options: DecodingOptions) -> bool:
    """Whether the CTC of an adapter is of use."""
    return options.selection == "spelling" or options.words or bool(options.proofread)


class System(Protocol):
    """What turns a batch of windows into text. No call knows of those before it."""

    default: PDDOptions
    times_words: bool
    """Whether it can tell when each word was said."""

    def check(self, options: DecodingOptions, language: str | None) -> None:
        """Raise before any work if these options cannot be served."""
        ...

    def detect(self, batch: Sequence[Window]) -> list[str]:
        """The language of each window. Raises LanguageError where the system cannot tell."""
        ...

    def start(
        self, batch: Sequence[Window], options: DecodingOptions, timings: dict[str, float]
    ) -> Callable[[], list[Heard]]:
        """Begin to transcribe windows, detecting the language of those that have none.

        What is returned finishes it, having added each stage's seconds to `timings`.
        """
        ...


class TranscribeOptions(TypedDict, total=False):
    """The keyword arguments of `Transcriber.transcribe`, which explains them."""

    language: str | Sequence[str | None] | None
    sample_rate: int | None
    candidates: int | None
    steps: int | None
    trajectory: Sequence[float] | None
    temperature: float | None
    remask: Literal["random", "confidence"] | None
    selection: SelectionName
    proofread: bool | None
    word_timestamps: bool
    reference: str | Sequence[str] | None
    seed: int
    trace: bool
    batch_size: int
    on_progress: Callable[[float], None] | None


class Transcriber:
    """Transcribes files, bytes, streams and arrays with one system. Make it with `whisfusion.load`."""

    def __init__(self, system: System) -> None:
        self.system = system

    @overload
    def transcribe(self, audio: Audio, **options: Unpack[TranscribeOptions]) -> Transcript: ...
    @overload
    def transcribe(
        self, audio: list[Audio] | tuple[Audio, ...], **options: Unpack[TranscribeOptions]
    ) -> list[Transcript]: ...

    def transcribe(
        self, audio: Audio | list[Audio] | tuple[Audio, ...], **options: Unpack[TranscribeOptions]
    ) -> Transcript | list[Transcript]:
        """Transcribe one audio, or a list or tuple of them in shared batches.

        An audio is a path, "-" for stdin, the bytes of a file, a binary file object, or samples (an array or tensor at
        16 kHz). Whatever is longer than 30 s is cut at quiet points, decoded in parts and joined.

        language: a code or an English name, one for all or one for each; None lets the model detect it, where it can.
        sample_rate: of arrays and tensors, 16 kHz if not given; files carry their own.
        candidates, steps, trajectory, temperature, remask: K, N and the rest of `PDDOptions`; the model's own if None.
        selection: "mbr", "confidence", "spelling" (mbr, and what the adapter's CTC finds likely), "rerank" (by
            Whisper's likelihood) or "oracle".
        proofread: whether Whisper's own decoder reads the chosen candidate, all of it at once, and corrects it where it
            and the adapter's CTC find other words likelier; None where it comes with the model.
        word_timestamps: tell when each word was said, in the segments' `words`; for models with an adapter, whose CTC
            hears where letters are.
        reference: the true transcript or transcripts, for the oracle alone.
        seed: with a window's samples it decides all randomness: what else is in the batch does not.
        trace: keep every denoising step of every candidate in the segments.
        batch_size: windows decoded at once, 16 if not given.
        on_progress: called with the seconds of audio done so far.

        Raises AudioError, LanguageError or OptionError, with a sentence that says what to do.
        """
        if isinstance(audio, list | tuple):
            return self._transcribe(list(audio), **options)
        return self._transcribe([audio], **options)[0]

    def _transcribe(
        self,
        sources: list[Audio],
        *,
        language: str | Sequence[str | None] | None = None,
        sample_rate: int | None = None,
        candidates: int | None = None,
        steps: int | None = None,
        trajectory: Sequence[float] | None = None,
        temperature: float | None = None,
        remask: Literal["random", "confidence"] | None = None,
        selection: SelectionName = "mbr",
        proofread: bool | None = None,
        word_timestamps: bool = False,
        reference: str | Sequence[str] | None = None,
        seed: int = 0,
        trace: bool = False,
        batch_size: int = 16,
        on_progress: Callable[[float], None] | None = None,
    ) -> list[Transcript]:
        references = [reference] if isinstance(reference, str) else list(reference or [None] * len(sources))
        if len(references) != len(sources):
            raise OptionError(f"{len(sources)} audios need as many references, not {len(references)}")
        if batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, not {batch_size}")
        if (selection == "oracle") != any(text is not None for text in references) and sources:
            raise OptionError(
                "oracle selection needs the reference transcript of every audio, and nothing else takes one"
            )
        given_languages = [language] * len(sources) if language is None or isinstance(language, str) else list(language)
        if len(given_languages) != len(sources):
            raise OptionError(f"{len(sources)} audios need one language or as many, not {len(given_languages)}")
        languages = [None if code is None else canonical_language(code) for code in given_languages]
        given = {
            "candidates": candidates,
            "steps": steps,
            "trajectory": None if trajectory is None else tuple(trajectory),
            "temperature": temperature,
            "remask": remask,
        }
        pdd = override_options(self.system.default, given)
        options = DecodingOptions(pdd, selection, trace, proofread, word_timestamps)
        asked = languages if sources else [canonical_language(language) if isinstance(language, str) else None]
        for code in dict.fromkeys(asked):
            self.system.check(options, code)

        files: list[list[tuple[int, int]]] = []
        batch: list[Window] = []
        for source, text, spoken in zip(sources, references, languages, strict=True):
            is_samples = isinstance(source, np.ndarray | torch.Tensor)
            samples = load_audio(source, sample_rate if is_samples else None)
            files.append(windows(samples))
            if text is not None and len(files[-1]) > 1:
                raise OptionError("oracle selection needs audio of at most 30 s: a reference covers one window")
            batch += [
                Window(samples[first:last], _seed(samples[first:last], seed), spoken, text) for first, last in files[-1]
            ]
        batch = self._one_language_per_file(batch, files, batch_size)
        heard, timings = self._recognise(batch, options, batch_size, on_progress)
        transcripts, place = [], 0
        for ranges in files:
            part = slice(place, place := place + len(ranges))
            transcripts.append(join(ranges, heard[part], timings[part]))
        return transcripts

    def _one_language_per_file(
        self, batch: list[Window], files: list[list[tuple[int, int]]], batch_size: int
    ) -> list[Window]:
        """Give all windows of a long file without a language that of its first, as Whisper does.

        A file of one window needs no look ahead: its language is detected as it is recognised.
        """
        starts = np.cumsum([0, *map(len, files)])
        long = [
            slice(start, start + len(ranges))
            for start, ranges in zip(starts, files, strict=False)
            if len(ranges) > 1 and batch[start].language is None
        ]
        for group in (long[i : i + batch_size] for i in range(0, len(long), batch_size)):
            languages = self.system.detect([batch[part.start] for part in group])
            for part, language in zip(group, languages, strict=True):
                batch[part] = [replace(window, language=language) for window in batch[part]]
        return batch

    def _recognise(
        self,
        batch: list[Window],
        options: DecodingOptions,
        batch_size: int,
        on_progress: Callable[[float], None] | None,
    ) -> tuple[list[Heard], list[dict[str, float]]]:
        """Longest first, so that batches are of one length and running out of memory shows at once.

        A batch is finished after the next has begun: a system may have a device work while the CPU selects.
        """
        heard = {i: silence for i, window in enumerate(batch) if (silence := _silence(window)) is not None}
        timings: dict[int, dict[str, float]] = {i: {} for i in heard}
        done = sum(batch[i].seconds for i in heard)
        if heard and on_progress is not None:
            on_progress(done)
        order = sorted((i for i in range(len(batch)) if i not in heard), key=lambda i: -len(batch[i].samples))

        def finish(rows: list[int], spent: dict[str, float], results: Callable[[], list[Heard]]) -> None:
            nonlocal done
            heard.update(zip(rows, results(), strict=True))
            share = {stage: seconds / len(rows) for stage, seconds in spent.items()}
            timings.update((row, share) for row in rows)
            done += sum(batch[i].seconds for i in rows)
            if on_progress is not None:
                on_progress(done)

        begun: tuple[list[int], dict[str, float], Callable[[], list[Heard]]] | None = None
        for start in range(0, len(order), batch_size):
            rows, spent = order[start : start + batch_size], {}
            following = (rows, spent, self.system.start([batch[i] for i in rows], options, spent))
            if begun is not None:
                finish(*begun)
            begun = following
        if begun is not None:
            finish(*begun)
        return [heard[i] for i in range(len(batch))], [timings[i] for i in range(len(batch))]


class Stopwatch:
    """Adds the seconds of stages to a dict, waiting for the GPU, if one is given, at each boundary."""

    def __init__(self, timings: dict[str, float], device: torch.device | None = None) -> None:
        self._timings, self._device = timings, device or torch.device("cpu")
        self._since = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def lap(self, stage: str) -> None:
        """What has passed since the last lap was `stage`."""
        now = self._now()
        self._timings[stage] = self._timings.get(stage, 0.0) + now - self._since
        self._since = now


def _silence(window: Window) -> Heard | None:
    """What is heard where every sample is 0, which needs no model; None where there may be anything else.

    Without a language the model is asked all the same: somebody has to name one.
    """
    if window.language is None or window.samples.any():
        return None
    return Heard(window.language, text="", tokens=(), avg_logprob=0.0, no_speech_prob=1.0)


def _seed(samples: np.ndarray, seed: int) -> int:
    """A window's own seed, from its samples and the user's."""
    salt = (operator.index(seed) % 2**64).to_bytes(8, "little")
    digest = hashlib.blake2b(samples.tobytes(), digest_size=8, salt=salt)
    return int.from_bytes(digest.digest(), "little") >> 1
