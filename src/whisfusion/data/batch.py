"""What a training step computes with, and the protocol of whatever feeds it.

Spectrograms come on the device. Targets stay on the host: masking happens there, so that the loop knows how
many positions are masked without waiting for the device.

Letters: B utterances, M mel bins, F mel frames, L canvas positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from whisfusion.errors import OptionError
from whisfusion.tokenizer import ENDOFTEXT, PROMPT_LENGTH, get_tokenizer

TextStyle = Literal["normalised", "written"]


@dataclass(frozen=True)
class Targets:
    """What the decoder is to write, for B utterances on canvases of up to L positions; on the CPU."""

    tokens_BL: Tensor
    """int64: prompt, transcript, endoftext; the rest is padding, which is endoftext's id too."""
    canvas_BL: Tensor
    """bool: each utterance's own canvas, prompt included."""
    scored_BL: Tensor
    """bool: the transcript and its endoftext. A row without any is not part of the loss."""
    counts_B: Tensor
    """float32: scored positions of each utterance, at least 1."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. F and L are the same for all micro-batches of a step, on all ranks."""

    mel_BMF: Tensor
    """Log-mel as `mel.log_mel` makes it, on the device, of any float dtype: 0.0 beyond each clip's frames.
    SpecAugment is not the feeder's: the loop applies it, once for all feeders (data/augment.py)."""
    frames_B: Tensor
    """int64, on the device: each clip's own frames, even and at least 2."""
    targets: Targets
    rows_B: Tensor
    """int64, on the CPU: which rows of the whole step (all ranks and micro-batches) these are. What is
    drawn at random for a row hangs on it, so that the number of ranks changes nothing."""
    total_rows: int
    """Rows of the whole step."""
    seconds: float
    """Speech in this micro-batch, padding not counted."""
    ids: tuple[str, ...]
    """Names of the utterances; joined clips as "a+b". A row whose clip could not be read is kept, with
    nothing scored: shapes stay what they are."""


Step = tuple[Batch, ...]
"""The micro-batches of one optimizer step, all of the same shape."""


class Failure(NamedTuple):
    """A clip that was left out, and why."""

    id: str
    reason: str


class Feeder(Protocol):
    """Where steps come from: audio decoded on the fly, or a bank of spectrograms on the GPU."""

    def __iter__(self) -> Iterator[Step]:
        """This rank's steps from the current place on, without end."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The place after the last step that was handed out, as JSON; prefetched steps do not count."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that place. Raises OptionError where the data are not the same."""
        ...

    def failures(self) -> list[Failure]:
        """Clips that could not be read since this was last asked."""
        ...

    def close(self) -> None:
        """Stop workers and let go of memory."""
        ...


def label_ids(text: str, language: str, style: TextStyle) -> list[int]:
    """Token ids of a transcript as the decoder learns it: with style "normalised" what the scorer sees."""
    if style == "normalised":
        from whisfusion.normalise import normalise

        text = normalise(text, language)
    return get_tokenizer().encode(text)


def make_targets(
    labels: Sequence[Sequence[int] | None], languages: Sequence[str], canvases: Sequence[int], positions: int
) -> Targets:
    """Targets from `label_ids` and each utterance's canvas (`Canvas.positions` of its seconds).

    Labels of None leave a row without anything scored. Raises OptionError where a transcript and its
    endoftext do not fit their canvas, or a canvas does not fit `positions`.
    """
    tokenizer = get_tokenizer()
    tokens_BL = torch.full((len(labels), positions), ENDOFTEXT)
    position_L = torch.arange(positions)
    ends = []
    for row_L, ids, language, canvas in zip(tokens_BL, labels, languages, canvases, strict=True):
        row_L[:PROMPT_LENGTH] = torch.tensor(tokenizer.prompt(language))
        ends.append(0 if ids is None else PROMPT_LENGTH + len(ids) + 1)
        if ends[-1] > canvas or canvas > positions:
            raise OptionError(
                f"{ends[-1]} positions of transcript do not fit a canvas of {canvas} in one of {positions}"
            )
        if ids:
            row_L[PROMPT_LENGTH : PROMPT_LENGTH + len(ids)] = torch.tensor(ids)
    end_B1 = torch.tensor(ends)[:, None]
    return Targets(
        tokens_BL=tokens_BL,
        canvas_BL=position_L < torch.tensor(list(canvases))[:, None],
        scored_BL=(position_L >= PROMPT_LENGTH) & (position_L < end_B1),
        counts_B=(end_B1[:, 0] - PROMPT_LENGTH).clamp(min=1).float(),
    )
