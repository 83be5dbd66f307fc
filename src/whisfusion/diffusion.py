"""Masked diffusion: how a transcript is corrupted in training and what the loss is. The only home of these formulas.

Letters: B utterances, L canvas positions, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.errors import OptionError
from whisfusion.tokenizer import MASK


@dataclass(frozen=True)
class MaskRatios:
    """Training mask ratios t ~ U(low, high): (0, 1) in stage 1, (0.7, 1) in stage 2."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise OptionError(f"mask ratios must satisfy 0 <= low <= high <= 1, not ({self.low}, {self.high})")

    def draw(self, count: int, *, generator: torch.Generator) -> Tensor:
        """One ratio per utterance, on the generator's device."""
        u_B = torch.rand(count, generator=generator, device=generator.device)
        return self.low + (self.high - self.low) * u_B


def corrupt(
    tokens_BL: Tensor, maskable_BL: Tensor, scored_BL: Tensor, ratio_B: Tensor, *, generator: torch.Generator
) -> Tensor:
    """Replace each maskable position by the mask with probability `ratio_B`.

    `maskable_BL` is all but the prompt, padding included; `scored_BL` the transcript and its endoftext. Where none of
    an utterance's scored positions fell under the mask, the one that came nearest does: every utterance counts.
    """
    u_BL = torch.rand(tokens_BL.shape, generator=generator, device=tokens_BL.device)
    masked_BL = maskable_BL & (u_BL < ratio_B[:, None])
    nearest_B1 = u_BL.masked_fill(~scored_BL, 2.0).argmin(1, keepdim=True)
    none_B1 = ~(masked_BL & scored_BL).any(1, keepdim=True) & scored_BL.any(1, keepdim=True)
    return tokens_BL.masked_fill(masked_BL.scatter(1, nearest_B1, none_B1 | masked_BL.gather(1, nearest_B1)), MASK)


def loss_weights(corrupted_BL: Tensor, scored_BL: Tensor) -> Tensor:
    """Each position's share of the objective: 1 / |M| on the masked, scored positions M of its utterance, else 0.

    The sum over a batch is its number of utterances with anything to predict; divide by that number (over all ranks) to
    get the paper's mean over positions, then over utterances.
    """
    in_loss_BL = (corrupted_BL == MASK) & scored_BL
    return in_loss_BL / in_loss_BL.sum(1, keepdim=True).clamp(min=1)


def position_losses(logits_RV: Tensor, targets_R: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each of R positions; float32 whatever the logits are."""
    return F.cross_entropy(logits_RV.float(), targets_R, reduction="none", label_smoothing=label_smoothing)


def diffusion_loss(losses_R: Tensor, weights_R: Tensor) -> Tensor:
    """The weighted sum of `position_losses` over the positions that have a weight."""
    return (losses_R * weights_R).sum()


def quantity_loss(quantity_B: Tensor, counts_B: Tensor) -> Tensor:
    """How far the anchors' token counts are off, relative to the true ones (endoftext included); mean of utterances."""
    return ((quantity_B - counts_B).abs() / counts_B.clamp(min=1)).mean()
