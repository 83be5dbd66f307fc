"""Steps from audio that is decoded while training: for corpora of any size.

Worker threads decode, resample and tokenise some steps ahead (all of that happens in C, outside Python's lock);
spectrograms are made on the device, one batch at a time.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.augment import add_noise, at_speed
from whisfusion.data.batch import Batch, Failure, Step, TextStyle, label_ids, make_targets
from whisfusion.data.epoch import Draw
from whisfusion.data.sampler import START, DrawnStep, Sampler
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.decoder import Canvas
from whisfusion.errors import AudioError
from whisfusion.mel import HOP, MAX_FRAMES, Window, clip_frames, log_mel_of_padded

_TOLERANCE = 0.25
"""Seconds by which a clip may be longer than its manifest says; what is over is cut."""


@dataclass(frozen=True)
class StreamOptions:
    """What becomes of an utterance on its way to the device."""

    mels: int
    """Bins of the spectrograms: 80, or 128 for large-v3 and turbo."""
    window: Window
    """Whether the encoder hears clips padded to 30 s or their own duration."""
    canvas: Canvas
    """How many positions the decoder writes on."""
    text_style: TextStyle
    """How the text is learned."""
    micro_batches: int = 1
    """Parts that a step is computed in."""
    noise: float = 0.0
    """Share of the utterances that get noise."""
    workers: int = 2
    """Threads that decode."""
    prefetch: int = 4
    """Steps that are decoded ahead."""


class StreamFeeder:
    """A `Feeder` that decodes each clip when its turn comes."""

    def __init__(
        self,
        utterances: Sequence[Utterance],
        sampler: Sampler,
        options: StreamOptions,
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        self._utterances, self._sampler, self._options = utterances, sampler, options
        self._device = torch.device(device)
        self._place = START
        self._failures: list[Failure] = []
        self._pool = ThreadPoolExecutor(options.workers, thread_name_prefix="decode")

    def __iter__(self) -> Iterator[Step]:
        """This rank's steps from the current place on, without end."""
        ahead: deque[tuple[DrawnStep, list[_Part]]] = deque()
        try:
            for drawn in self._sampler.steps_from(self._place):
                ahead.append((drawn, [self._submit(part) for part in drawn.split(self._options.micro_batches)]))
                if len(ahead) > self._options.prefetch:
                    drawn, parts = ahead.popleft()
                    step = tuple(self._finish(part) for part in parts)
                    self._place = drawn.next
                    yield step
        finally:
            for _, parts in ahead:
                for part in parts:
                    for future in part.futures:
                        future.cancel()

    def state_dict(self) -> dict[str, Any]:
        """The place after the last step that was handed out."""
        return self._sampler.state_dict(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that place. Raises OptionError where the data are not the same."""
        self._place = self._sampler.load_state_dict(state)

    def failures(self) -> list[Failure]:
        """Clips that could not be read since this was last asked."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, drawn: DrawnStep) -> "_Part":
        frames = MAX_FRAMES if self._options.window == "padded" else _frames_in(drawn.window)
        pinned = self._device.type == "cuda"
        samples_BN = torch.zeros(len(drawn.draws), frames * HOP, pin_memory=pinned)
        futures = [
            self._pool.submit(self._load, draw, row_N, (*drawn.place, row))
            for draw, row_N, row in zip(drawn.draws, samples_BN, drawn.rows, strict=True)
        ]
        return _Part(drawn, samples_BN, futures)

    def _load(self, draw: Draw, row_N: Tensor, key: tuple[int, ...]) -> "_Row":
        """Fill `row_N` with the sound of a draw and return the rest of it; in a worker thread."""
        options = self._options
        clips = [self._utterances[clip] for clip in draw.clips]
        name, language = "+".join(clip.id for clip in clips), clips[0].language
        canvas = options.canvas.positions(draw.seconds)
        rng = np.random.default_rng([self._sampler.options.seed, *key])
        try:
            samples = at_speed(np.concatenate([load_samples(clip) for clip in clips]), draw.speed)
        except AudioError as error:
            return _Row(name, language, canvas, failure=Failure(name, str(error)))
        seconds = len(samples) / SAMPLE_RATE
        if abs(seconds - draw.seconds) > _TOLERANCE * len(clips):
            reason = f"lasts {seconds:.2f} s, but by the manifest {draw.seconds:.2f} s"
            return _Row(name, language, canvas, failure=Failure(name, reason))
        samples = samples[: int(draw.seconds * SAMPLE_RATE)]
        if rng.random() < options.noise:
            samples = add_noise(samples, rng=rng)
        row_N[: len(samples)] = torch.from_numpy(np.ascontiguousarray(samples))
        ids = [i for clip in clips for i in label_ids(clip.text, language, options.text_style)]
        return _Row(name, language, canvas, ids, len(samples))

    def _finish(self, part: "_Part") -> Batch:
        options, drawn = self._options, part.drawn
        rows = [future.result() for future in part.futures]
        self._failures += [row.failure for row in rows if row.failure is not None]
        padded = options.window == "padded"
        frames = [MAX_FRAMES if padded else clip_frames(row.samples) for row in rows]
        frames_B = torch.tensor(frames, pin_memory=part.samples_BN.is_pinned()).to(self._device, non_blocking=True)
        samples_BN = part.samples_BN.to(self._device, non_blocking=True)
        return Batch(
            mel_BMF=log_mel_of_padded(samples_BN, frames_B, n_mels=options.mels),
            frames_B=frames_B,
            targets=make_targets(
                [row.ids for row in rows],
                [row.language for row in rows],
                [row.canvas for row in rows],
                options.canvas.positions(drawn.window),
            ),
            rows_B=torch.tensor(drawn.rows),
            total_rows=drawn.total_rows,
            seconds=sum(row.samples for row in rows) / SAMPLE_RATE,
            ids=tuple(row.name for row in rows),
        )


@dataclass(frozen=True)
class _Row:
    """What a worker made of a draw; a failed one is silent, and nothing of it is scored."""

    name: str
    language: str
    canvas: int
    ids: list[int] | None = None
    samples: int = 0
    failure: Failure | None = None


@dataclass(frozen=True)
class _Part:
    """A micro-batch whose rows are being filled."""

    drawn: DrawnStep
    samples_BN: Tensor
    futures: list["Future[_Row]"]


def _frames_in(seconds: float) -> int:
    """Mel frames of a window of so many seconds (its silent end included), even."""
    return min(MAX_FRAMES, 2 * math.ceil(seconds * SAMPLE_RATE / (2 * HOP) - 1e-6))
