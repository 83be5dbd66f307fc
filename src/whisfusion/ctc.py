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
        return DeviceLoss.apply(logits_BTV, targets_BS, input_lengths_B, target_lengths_B, None)[0]
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


def ctc_loss_and_places(
    logits_BTV: Tensor, targets_BS: Tensor, input_lengths_B: Tensor, target_lengths_B: Tensor, values_BS: Tensor
) -> tuple[Tensor, Tensor]:
    """`ctc_loss`, and where in the target each frame is, by the probabilities of all paths: (B, T, 2), no gradient.

    The first of the two is the expected value (of `values_BS`) of the byte that was heard last, 0 before the first; the
    second is the probability that all have been heard. Both are 0 where a target has no path.
    """
    lengths = (input_lengths_B, target_lengths_B)
    if logits_BTV.is_cuda:
        return DeviceLoss.apply(logits_BTV, targets_BS, *lengths, values_BS)
    with torch.no_grad():
        places_BT2 = _places(logits_BTV, targets_BS, *lengths, values_BS)
    return ctc_loss(logits_BTV, targets_BS, *lengths), places_BT2


class DeviceLoss(torch.autograd.Function):
    """`ctc_loss` with lengths that stay on the device, which PyTorch's own cannot do; with values the places too.

    The gradient is made together with the loss: what it takes to make is larger than it, and is free again at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_BTV: Tensor,
        targets_BS: Tensor,
        input_lengths_B: Tensor,
        target_lengths_B: Tensor,
        values_BS: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        # Triton comes with PyTorch for GPUs alone.
        from whisfusion.ctc_triton import log_likelihood

        likelihood_B, gradient_BTV, places_BT2 = log_likelihood(
            logits_BTV,
            targets_BS,
            input_lengths_B,
            target_lengths_B,
            blank=BLANK,
            with_gradient=ctx.needs_input_grad[0] or values_BS is not None,
            values_BS=values_BS,
        )
        ctx.save_for_backward(gradient_BTV)
        if places_BT2 is not None:
            ctx.mark_non_differentiable(places_BT2)
        return -likelihood_B, places_BT2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_B: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        (gradient_BTV,) = ctx.saved_tensors
        return (gradient_BTV * -outer_B[:, None, None]).to(gradient_BTV.dtype), None, None, None, None


def _places(
    logits_BTV: Tensor, targets_BS: Tensor, input_lengths_B: Tensor, target_lengths_B: Tensor, values_BS: Tensor
) -> Tensor:
    """The forward-backward algorithm frame by frame: slow, and plain. States are blank, byte, blank, byte ... blank."""
    batch, frames, _ = logits_BTV.shape
    logp_BTV = F.log_softmax(logits_BTV, dim=-1, dtype=torch.float64)
    states = 2 * targets_BS.shape[1] + 1
    classes_BZ = torch.full((batch, states), BLANK)
    classes_BZ[:, 1::2] = targets_BS
    value_BZ = torch.zeros(batch, states, dtype=torch.float64)
    value_BZ[:, 1::2] = value_BZ[:, 2::2] = values_BS.double()
    last_B1 = 2 * target_lengths_B[:, None]
    state_Z = torch.arange(states)
    own_BZ = state_Z <= last_B1
    skips_BZ = (state_Z % 2 == 1) & (state_Z > 1) & (classes_BZ != classes_BZ.roll(2, 1))

    def reached(from_BZ: Tensor) -> Tensor:
        before = [F.pad(from_BZ, (by, 0), value=-torch.inf)[:, :states] for by in (1, 2)]
        before[1] = before[1].masked_fill(~skips_BZ, -torch.inf)
        return torch.stack((from_BZ, *before)).logsumexp(0)

    def led_on(from_BZ: Tensor) -> Tensor:
        skipped_BZ = from_BZ.masked_fill(~skips_BZ, -torch.inf)
        after = [F.pad(x_BZ, (0, by), value=-torch.inf)[:, by:] for by, x_BZ in ((1, from_BZ), (2, skipped_BZ))]
        return torch.stack((from_BZ, *after)).logsumexp(0)

    heard = [
        logp_BTV[:, t].gather(1, classes_BZ).masked_fill(~own_BZ | (t >= input_lengths_B[:, None]), -torch.inf)
        for t in range(frames)
    ]
    at_BZ = torch.zeros(batch, states, dtype=torch.float64).masked_fill(state_Z > 0, -torch.inf)
    ways = []
    for heard_BZ in heard:
        at_BZ = reached(at_BZ) + heard_BZ
        ways.append(at_BZ)
    places_BT2 = torch.zeros(batch, frames, 2)
    end_BZ = torch.where(own_BZ & (state_Z >= last_B1 - 1), 0.0, -torch.inf)
    after_BZ = end_BZ
    for t in reversed(range(frames)):
        after_BZ = torch.where(input_lengths_B[:, None] == t + 1, end_BZ, after_BZ)
        share_BZ = (ways[t] + after_BZ).softmax(1).nan_to_num()
        places_BT2[:, t, 0] = (share_BZ * value_BZ).sum(1).float()
        places_BT2[:, t, 1] = share_BZ.gather(1, last_B1)[:, 0].float()
        after_BZ = led_on(after_BZ + heard[t])
    return places_BT2


def _merge(best_T: Tensor) -> Spelling:
    classes, counts = best_T.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    runs = zip(classes.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    spelt = [(index, (start, end)) for index, start, end in runs if index != BLANK]
    return Spelling(tuple(index for index, _ in spelt), tuple(span for _, span in spelt))
