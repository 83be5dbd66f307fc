"""The forward-backward algorithm of CTC as Triton kernels, with lengths that never leave the device.

A target of S bytes is S + 1 pairs: pair k is a blank and the byte after it (the last pair's byte does not exist). From
a blank a path stays, or goes on to its byte; from a byte it stays, or goes on to the next blank or, if that differs, to
the next byte. One program walks one utterance through time with all its pairs in registers; a step then moves a single
value from each pair to its neighbour.

Letters: B utterances, T frames, V classes, S bytes of the longest target, K = S + 1 pairs.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Triton is not on every machine, and takes tensors for what its kernels declare as pointers: checkers see Any.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_NEVER = tl.constexpr(-1e30)
"""The logarithm of no probability: unlike -inf, it can be subtracted from itself."""


def log_likelihood(
    logits_BTV: Tensor,
    targets_BS: Tensor,
    input_lengths_B: Tensor,
    target_lengths_B: Tensor,
    *,
    blank: int,
    with_gradient: bool,
    values_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Each target's log-likelihood in float32, and its gradient by the logits in their own type.

    Both are 0 where a target has no path through its frames. With the gradient and `values_BS` (float32, a value for
    each byte) also (B, T, 2): the expected value of the byte that was heard last, 0 before the first, and the
    probability that all have been heard. Runs on a GPU, or under TRITON_INTERPRET=1 on a CPU.
    """
    batch, frames, classes = logits_BTV.shape
    longest = targets_BS.shape[1]
    pairs = longest + 1
    logp_BTV = torch.log_softmax(logits_BTV, dim=-1, dtype=torch.float32).contiguous()
    # Only what is kept for the gradient lies in memory: a walk without it writes no history.
    history = (batch, frames, pairs) if with_gradient else (0,)
    blank_BTK, byte_BTK = logp_BTV.new_empty(history), logp_BTV.new_empty(history)
    total_B = logp_BTV.new_empty(batch)
    targets = (targets_BS.contiguous(), input_lengths_B.contiguous(), target_lengths_B.contiguous())
    sizes = (frames, longest, classes, blank)
    block = max(32, triton.next_power_of_2(pairs))
    # A warp to every 32 pairs; beyond 8 warps, waiting for each other costs more than it gains.
    walk = {"BLOCK": block, "num_warps": min(8, block // 32)}
    _forward[(batch,)](logp_BTV, *targets, blank_BTK, byte_BTK, total_B, *sizes, KEEP=with_gradient, **walk)
    # Written so that NaN stays NaN.
    impossible_B = total_B < _NEVER.value / 2
    likelihood_B = total_B.masked_fill(impossible_B, 0.0)
    if not with_gradient:
        return likelihood_B, None, None
    share_BTV = torch.zeros_like(logp_BTV)
    heard_BT2 = None if values_BS is None else logp_BTV.new_zeros(batch, frames, 2)
    values = share_BTV if values_BS is None else values_BS.contiguous()
    _backward[(batch,)](
        logp_BTV,
        *targets,
        blank_BTK,
        byte_BTK,
        total_B,
        share_BTV,
        values,
        share_BTV if heard_BT2 is None else heard_BT2,
        *sizes,
        VALUES=heard_BT2 is not None,
        **walk,
    )
    gradient_BTV = torch.empty_like(logp_BTV, dtype=logits_BTV.dtype)
    row = triton.next_power_of_2(classes)
    _gradient[(batch * frames,)](
        logp_BTV, share_BTV, targets[1], impossible_B, gradient_BTV, frames, classes, BLOCK=row
    )
    return likelihood_B, gradient_BTV, heard_BT2


@triton.jit
def _either(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """log(exp(a) + exp(b)), NaN if either is."""
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def _utterance(
    targets: tl.tensor,
    input_lengths: tl.tensor,
    target_lengths: tl.tensor,
    frames: tl.tensor,
    longest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """This program's utterance, its lengths, its bytes by pair, and which of them differ from the byte before."""
    utterance = tl.program_id(0).to(tl.int64)
    # A wrong length must not lead out of the tensors.
    length = tl.minimum(tl.load(input_lengths + utterance), frames).to(tl.int32)
    count = tl.minimum(tl.load(target_lengths + utterance), longest).to(tl.int32)
    k = tl.arange(0, BLOCK)
    own = targets + utterance * longest + k
    byte = tl.load(own, mask=k < count, other=0)
    before = tl.load(own - 1, mask=(k > 0) & (k < count), other=-1)
    return utterance, length, count, k, byte, byte != before


@triton.jit(do_not_specialize=["frames", "longest"])
def _forward(
    logp: tl.tensor,
    targets: tl.tensor,
    input_lengths: tl.tensor,
    target_lengths: tl.tensor,
    blanks: tl.tensor,
    bytes_: tl.tensor,
    totals: tl.tensor,
    frames: tl.tensor,
    longest: tl.tensor,
    classes: tl.constexpr,
    blank_class: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Log-probability of all ways to each blank and byte at each frame (where KEEP), and of the whole target."""
    utterance, length, count, k, byte, differs = _utterance(
        targets, input_lengths, target_lengths, frames, longest, BLOCK
    )
    # Before the first frame a path stands on the first blank.
    at_blank = tl.where(k == 0, 0.0, _NEVER)
    at_byte = tl.full((BLOCK,), _NEVER, tl.float32)
    t = 0
    while t < length:  # The interpreter cannot make a range of a length that it has loaded.
        frame = utterance * frames + t
        heard = logp + frame * classes
        heard_blank = tl.load(heard + blank_class)
        heard_byte = tl.load(heard + byte, mask=k < count, other=_NEVER)
        from_before = tl.where(k == 0, _NEVER, tl.gather(at_byte, tl.maximum(k - 1, 0), 0))
        at_byte = _either(_either(at_byte, at_blank), tl.where(differs, from_before, _NEVER)) + heard_byte
        at_blank = _either(at_blank, from_before) + heard_blank
        if KEEP:
            kept = frame * (longest + 1) + k
            tl.store(blanks + kept, at_blank, mask=k <= count)
            tl.store(bytes_ + kept, at_byte, mask=k <= count)
        t += 1
    # Sums, because a maximum would lose NaN. An empty target has no last byte.
    last_blank = tl.sum(tl.where(k == count, at_blank, 0.0))
    last_byte = tl.where(count > 0, tl.sum(tl.where(k == count - 1, at_byte, 0.0)), _NEVER)
    tl.store(totals + utterance, _either(last_blank, last_byte))


@triton.jit(do_not_specialize=["frames", "longest"])
def _backward(
    logp: tl.tensor,
    targets: tl.tensor,
    input_lengths: tl.tensor,
    target_lengths: tl.tensor,
    blanks: tl.tensor,
    bytes_: tl.tensor,
    totals: tl.tensor,
    shares: tl.tensor,
    values: tl.tensor,
    heard_values: tl.tensor,
    frames: tl.tensor,
    longest: tl.tensor,
    classes: tl.constexpr,
    blank_class: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add to `shares` (B, T, V) the part of the target's likelihood whose paths are in a class at a frame.

    Where VALUES, store in `heard_values` (B, T, 2) the mean over all paths of the value of the byte heard last, and the
    part of the paths that are past the last byte.
    """
    utterance, length, count, k, byte, differs = _utterance(
        targets, input_lengths, target_lengths, frames, longest, BLOCK
    )
    total = tl.load(totals + utterance)
    if total < _NEVER / 2:
        length = 0
    if VALUES:
        value = tl.load(values + utterance * longest + k, mask=k < count, other=0.0)
        value_before = tl.load(values + utterance * longest + k - 1, mask=(k > 0) & (k <= count), other=0.0)
    # Log-probability of what follows from the next frame on; after the last frame a path stands on the last blank.
    from_blank = tl.where(k == count, 0.0, _NEVER)
    from_byte = tl.full((BLOCK,), _NEVER, tl.float32)
    t = length - 1
    while t >= 0:
        frame = utterance * frames + t
        heard = logp + frame * classes
        heard_blank = tl.load(heard + blank_class)
        heard_byte = tl.load(heard + byte, mask=k < count, other=_NEVER)
        kept = frame * (longest + 1) + k
        at_blank = tl.load(blanks + kept, mask=k <= count, other=_NEVER)
        at_byte = tl.load(bytes_ + kept, mask=k <= count, other=_NEVER)
        entered = _either(from_blank, tl.where(differs, from_byte, _NEVER))
        # The last pair has no byte to go on from, so that it may see itself as its neighbour.
        onward = tl.gather(entered, tl.minimum(k + 1, BLOCK - 1), 0)
        after_blank = _either(from_blank, from_byte)
        after_byte = _either(from_byte, onward)
        share = shares + frame * classes
        share_blank = tl.exp(at_blank + after_blank - total)
        tl.store(share + blank_class, tl.sum(share_blank))
        share_byte = tl.exp(at_byte + after_byte - total)
        if VALUES:
            whole = tl.maximum(tl.sum(share_blank) + tl.sum(share_byte), 1e-30)
            tl.store(heard_values + 2 * frame, tl.sum(share_blank * value_before + share_byte * value) / whole)
            tl.store(heard_values + 2 * frame + 1, tl.sum(tl.where(k == count, share_blank, 0.0)) / whole)
        tl.atomic_add(share + byte, share_byte, mask=(k < count) & (share_byte != 0.0), sem="relaxed")
        from_blank = after_blank + heard_blank
        from_byte = after_byte + heard_byte
        t -= 1


@triton.jit(do_not_specialize=["frames"])
def _gradient(
    logp: tl.tensor,
    shares: tl.tensor,
    input_lengths: tl.tensor,
    impossible: tl.tensor,
    gradient: tl.tensor,
    frames: tl.tensor,
    classes: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One frame's gradient by its logits: its shares less its probabilities, or 0 where it does not count."""
    frame = tl.program_id(0).to(tl.int64)
    utterance = frame // frames
    counts = (frame % frames < tl.load(input_lengths + utterance)) & (tl.load(impossible + utterance) == 0)
    v = tl.arange(0, BLOCK)
    place, within = frame * classes + v, v < classes
    share = tl.load(shares + place, mask=within, other=0.0)
    # The shares of a frame add up to 1 but for what rounding did over a long walk: that goes here.
    share = share / tl.maximum(tl.sum(share), 1e-30)
    probability = tl.exp(tl.load(logp + place, mask=within, other=0.0))
    tl.store(gradient + place, tl.where(counts, share - probability, 0.0), mask=within)
