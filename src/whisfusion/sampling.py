"""Draw tokens from logits.

Letters: R positions to write, V vocabulary, C draws of a position, M columns that matter.
"""

import torch
from torch import Tensor

_LEAST_UNIFORM = 2.0**-25
_NEGLIGIBLE = -30.0
"""Log-mass next to the likeliest token's, of which a whole vocabulary is still less than the least uniform."""
_BLOCK, _LIKELY_BLOCKS = 64, 16


def sample(logits_RV: Tensor, uniforms_RC: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw C columns per row by inverting the cumulative distribution at `temperature`; 0 takes the most likely.

    `logits_RV` are float32. Returns columns (R, C) and each row's log-sum-exp (R, 1), to make log-probabilities of
    logits.
    """
    top_R1 = logits_RV.amax(1, keepdim=True)
    # The same as logsumexp, in fewer passes.
    total_R1 = top_R1 - logits_RV.softmax(1).amax(1, keepdim=True).log_()
    if temperature == 0:
        return logits_RV.argmax(1, keepdim=True).expand_as(uniforms_RC), total_R1
    # A GPU reads all columns faster than it tells which of them matter.
    some_RM = None if logits_RV.is_cuda else _likely(logits_RV, top_R1 + _NEGLIGIBLE * temperature)
    values_RM = logits_RV if some_RM is None else logits_RV.gather(1, some_RM)
    # Below the clamp, exp gives numbers that add nothing and that a CPU is slow to handle.
    mass_RM = (values_RM - top_R1).div_(temperature).clamp_(min=_NEGLIGIBLE).exp_().cumsum_(1)
    # A uniform of exactly 0 would draw the first id, however unlikely.
    drawn_RC = torch.searchsorted(mass_RM, uniforms_RC.clamp(min=_LEAST_UNIFORM) * mass_RM[:, -1:], right=True)
    drawn_RC = drawn_RC.clamp_(max=mass_RM.shape[1] - 1)
    return drawn_RC if some_RM is None else some_RM.gather(1, drawn_RC), total_R1


def _likely(logits_RV: Tensor, least_R1: Tensor) -> Tensor | None:
    """Columns (R, M) in ascending order, among them all whose logits are at least `least_R1`; None if that is too many.

    Found by the maxima of blocks of columns: a few blocks hold all that can be drawn, and the rest is read only once.
    """
    blocks = logits_RV.shape[1] // _BLOCK
    if blocks <= _LIKELY_BLOCKS:
        return None
    peaks_RJ = logits_RV[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(2)
    highest_RJ, which_RJ = peaks_RJ.topk(_LIKELY_BLOCKS + 1)
    if (highest_RJ[:, -1:] >= least_R1).any():
        return None
    column_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    first_RJ1 = which_RJ[:, :-1].sort(1).values[..., None] * _BLOCK
    rest_RM = column_V[blocks * _BLOCK :].expand(len(logits_RV), -1)
    return torch.cat(((first_RJ1 + column_V[:_BLOCK]).flatten(1), rest_RM), 1)
