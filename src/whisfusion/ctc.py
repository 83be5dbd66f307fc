"""Connectionist temporal classification over the UTF-8 bytes of a transcript: the loss, and reading its best path.

Class 0 is blank and class b + 1 is the byte b, so that one small head writes every language.
Letters: B utterances, T frames, V classes, S bytes of the longest target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLANK = 0
CLASSES = 257
"""Blank and the 256 bytes."""


@dataclass(frozen=True)
class Spelling:
    """The bytes along a path through the frames of one utterance, and when each was heard."""

    ids: tuple[int, ...]
    """Classes without blanks, as `byte_targets` numbers them."""
    spans: tuple[tuple[int, int], ...]
    """For each of them its first frame and the frame after its last."""

    @property
    def text(self) -> str:
        return bytes_to_text(self.ids)


def byte_targets(text: str) -> list[int]:
    """The classes that spell `text`; none for an empty one."""
    return [byte + 1 for byte in text.encode()]


def bytes_to_text(ids: Iterable[int]) -> str:
    """The text that classes without blanks spell; U+FFFD where bytes are no UTF-8.

    Raises ValueError for a blank or for what is no class.
    """
    return bytes(index - 1 for index in ids).decode(errors="replace")


def greedy(logits_BTV: Tensor, lengths_B: Tensor) -> list[Spelling]:
    """The best class of every frame, runs of one class merged and blanks dropped; waits for the device once."""
    lengths = lengths_B.tolist()
    return [_merge(best_T[:length]) for best_T, length in zip(logits_BTV.argmax(-1).cpu(), lengths, strict=True)]


def greedy_text(logits_TV: Tensor, length: int) -> str:
    """What `greedy` reads in the first `length` frames of one utterance."""
    return _merge(logits_TV[:length].argmax(-1).cpu()).text


def greedy_texts(logits_BTV: Tensor, lengths_B: Tensor) -> list[str]:
    """What `greedy` reads in each utterance."""
    return [spelling.text for spelling in greedy(logits_BTV, lengths_B)]


def log_likelihoods(logits_TV: Tensor, targets: Sequence[Sequence[int]]) -> list[float]:
    """Of each of several targets, in the frames of one utterance; minus infinity where a target has no path."""
    logp_TV = F.log_softmax(logits_TV.float().cpu(), dim=-1)
    losses = F.ctc_loss(
        logp_TV[:, None].expand(-1, len(targets), -1),
        torch.tensor([index for target in targets for index in target], dtype=torch.long),
        torch.full((len(targets),), len(logp_TV)),
        torch.tensor([len(target) for target in targets]),
        blank=BLANK,
        reduction="none",
    )
    return [-loss for loss in losses.tolist()]


def ctc_loss(logits_BTV: Tensor, targets_BS: Tensor, input_lengths_B: Tensor, target_lengths_B: Tensor) -> Tensor:
    """Negative log-likelihood of each utterance's target, (B,) in float32; the classes are normalised here.

    Frames and targets beyond an utterance's lengths count for nothing. Where a target has no path through its frames
    (too few of them), loss and gradient are 0. On a GPU nothing waits for the device, so the call can be captured in
    a CUDA graph and replayed with other lengths; there, lengths beyond the tensors' own are cut to them.
    """
    if logits_BTV.is_cuda:
        return DeviceLoss.apply(logits_BTV, targets_BS, input_lengths_B, target_lengths_B)
    logp_BTV = F.log_softmax(logits_BTV, dim=-1, dtype=torch.float32)
    return F.ctc_loss(
        logp_BTV.transpose(0, 1),
        targets_BS,
        input_lengths_B.cpu(),
        target_lengths_B.cpu(),
        blank=BLANK,
        reduction="none",
        zero_infinity=True,
    )


class DeviceLoss(torch.autograd.Function):
    """`ctc_loss` with lengths that stay on the device, which PyTorch's own cannot do.

    The gradient is made together with the loss: what it takes to make is larger than it, and is free again at once.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_BTV: Tensor, targets_BS: Tensor, input_lengths_B: Tensor, target_lengths_B: Tensor
    ) -> Tensor:
        # Triton comes with PyTorch for GPUs alone.
        from whisfusion.ctc_triton import log_likelihood

        likelihood_B, gradient_BTV = log_likelihood(
            logits_BTV,
            targets_BS,
            input_lengths_B,
            target_lengths_B,
            blank=BLANK,
            with_gradient=ctx.needs_input_grad[0],
        )
        ctx.save_for_backward(gradient_BTV)
        return -likelihood_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_B: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_BTV,) = ctx.saved_tensors
        return (gradient_BTV * -outer_B[:, None, None]).to(gradient_BTV.dtype), None, None, None


def _merge(best_T: Tensor) -> Spelling:
    classes, counts = best_T.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    runs = zip(classes.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    spelt = [(index, (start, end)) for index, start, end in runs if index != BLANK]
    return Spelling(tuple(index for index, _ in spelt), tuple(span for _, span in spelt))
