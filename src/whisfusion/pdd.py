"""Parallel Diffusion Decoding: K transcripts of an utterance, written at once, in N steps.

Knows no model: it asks a `Predictor`. All of an utterance's randomness is one small tensor of uniforms drawn from its
own seed, so that what it is batched with, and the device it runs on, do not change what is drawn.

Letters: B utterances, K candidates, N steps, L canvas positions, R masked positions of all sequences, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from whisfusion.errors import OptionError
from whisfusion.tokenizer import ENDOFTEXT, MASK

PAPER_TRAJECTORY = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Input mask ratios of the paper's steps; its default uses the first three."""

_NEGLIGIBLE = -80.0
"""Log-mass next to the likeliest token's, of which a whole vocabulary is still lost in float32's rounding."""
_LEAST_UNIFORM = 2.0**-25
_LEAST_TEMPERATURE = 1e-3
"""Below this float32 overflows; 0 is greedy."""
_ROWS_AT_ONCE = 512
"""Logits over the vocabulary are the largest thing in decoding: they exist for this many positions at a time."""


@dataclass(frozen=True)
class PDDOptions:
    """How to decode. The defaults are the paper's."""

    candidates: int = 5
    """K: transcripts drawn per utterance."""
    steps: int = 3
    """N: denoising steps."""
    trajectory: tuple[float, ...] | None = None
    """Mask ratio at the input of each step, starting at 1; None takes the first N of [1.0, 0.9, 0.8, 0.7, 0.6]."""
    temperature: float = 0.1
    """Of the softmax that tokens are drawn from; 0 is greedy."""
    remask: Literal["random", "confidence"] = "random"
    """Which tokens are masked again between steps: each with the step's probability, or the least confident."""
    share_first_step: bool = True
    """Run the first step, whose input is the same for all candidates, once instead of K times."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a whole number, not {getattr(self, name)!r}"
            for name in ("candidates", "steps")
            if not isinstance(getattr(self, name), int)
        ]
        numbers = (self.temperature, *(self.trajectory or ()))
        if not all(isinstance(number, int | float) for number in numbers):
            problems.append("temperature and trajectory must be numbers")
        OptionError.collect(problems)
        if self.candidates < 1:
            problems.append(f"candidates (K) must be at least 1, not {self.candidates}")
        if self.steps < 1:
            problems.append(f"steps (N) must be at least 1, not {self.steps}")
        if not (self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < math.inf):
            problems.append(
                f"temperature must be 0 (greedy) or more, at least {_LEAST_TEMPERATURE}, not {self.temperature}"
            )
        if self.remask not in ("random", "confidence"):
            problems.append(f"remask must be 'random' or 'confidence', not {self.remask!r}")
        if self.trajectory is None:
            if self.steps > len(PAPER_TRAJECTORY):
                problems.append(
                    f"{self.steps} steps need a trajectory: there is a default for up to {len(PAPER_TRAJECTORY)}"
                )
        else:
            given = list(self.trajectory)
            if len(given) != self.steps:
                problems.append(f"a trajectory for {self.steps} steps has {self.steps} ratios, not {len(given)}")
            if given and given[0] != 1:
                problems.append(f"a trajectory starts at 1 (everything masked), not {given[0]}")
            if not all(0 <= ratio <= 1 for ratio in given):
                problems.append(f"the ratios of a trajectory are between 0 and 1, not {given}")
        OptionError.collect(problems)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The mask ratio at the input of each of the N steps."""
        return PAPER_TRAJECTORY[: self.steps] if self.trajectory is None else tuple(self.trajectory)


class Predictor(Protocol):
    """The model, as decoding sees it."""

    def states(self, tokens_BKL: Tensor) -> Tensor:
        """Hidden states (B, K, L, D) of partly masked canvases."""
        ...

    def logits(self, states_RD: Tensor) -> Tensor:
        """Logits (R, V) over the V lowest ids, all of which may be written; endoftext is among them."""
        ...


@dataclass(frozen=True)
class Candidate:
    """One transcript: its tokens before endoftext, and how sure the model was of them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability at temperature 1 of each token when it was last written; the last is endoftext's, if written."""

    @property
    def complete(self) -> bool:
        """Whether it ends with endoftext; if not, the canvas was full and there may have been more to write."""
        return len(self.logprobs) > len(self.tokens)

    @property
    def confidence(self) -> float:
        """Mean log-probability of the tokens through endoftext."""
        return sum(self.logprobs) / max(1, len(self.logprobs))


@dataclass(frozen=True)
class Step:
    """What one step saw and wrote, for those who ask for a trace."""

    masked_BKL: Tensor
    """Positions that were masked at the step's input."""
    tokens_BKL: Tensor
    """The canvases after it."""
    logprobs_BKL: Tensor
    """Log-probability of each token when it was last written."""

    def of(self, row: int, positions: slice) -> "UtteranceStep":
        """The part of one utterance, for the given positions of its canvas."""
        masked, tokens, logprobs = (
            tuple(map(tuple, values_BKL[row, :, positions].tolist()))
            for values_BKL in (self.masked_BKL, self.tokens_BKL, self.logprobs_BKL)
        )
        return UtteranceStep(masked, tokens, logprobs)


@dataclass(frozen=True)
class UtteranceStep:
    """What one step did to one utterance: for each candidate, position by position."""

    masked: tuple[tuple[bool, ...], ...]
    """Whether it was masked at the step's input."""
    tokens: tuple[tuple[int, ...], ...]
    """The token after the step."""
    logprobs: tuple[tuple[float, ...], ...]
    """The token's log-probability when it was last written."""


@dataclass(frozen=True)
class Decoded:
    """All candidates of a batch, and the steps that led there if a trace was asked for."""

    candidates: list[list[Candidate]]
    trace: list[Step]


def draw_uniforms(seed: int, options: PDDOptions, positions: int) -> Tensor:
    """An utterance's randomness (K, N, 2, L): what to write, and what to mask again.

    Candidate k's part does not depend on K, so more candidates are the same ones and some more.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (options.steps, 2, positions)
    return torch.stack([torch.rand(shape, generator=generator) for _ in range(options.candidates)])


@torch.no_grad()
def parallel_decode(
    predictor: Predictor,
    prompts_BP: Tensor,
    canvas_B: Sequence[int],
    seeds_B: Sequence[int],
    options: PDDOptions,
    *,
    trace: bool = False,
) -> Decoded:
    """Decode B utterances with canvases of `canvas_B` positions, prompt included, each from its own seed."""
    device, longest = prompts_BP.device, max(canvas_B)
    utterances, prompt_length = prompts_BP.shape
    uniforms_BKN2L = torch.zeros(utterances, options.candidates, options.steps, 2, longest)
    for row, (seed, positions) in enumerate(zip(seeds_B, canvas_B, strict=True)):
        uniforms_BKN2L[row, ..., :positions] = draw_uniforms(seed, options, positions)
    uniforms_BKN2L = uniforms_BKN2L.to(device)

    position_L = torch.arange(longest, device=device)
    canvas_B11 = torch.tensor(list(canvas_B), device=device)[:, None, None]
    writable_B1L = (position_L >= prompt_length) & (position_L < canvas_B11)
    tokens_BKL = torch.full((utterances, 1, longest), ENDOFTEXT, device=device)
    tokens_BKL[:, 0, :prompt_length] = prompts_BP
    tokens_BKL = tokens_BKL.masked_fill(writable_B1L, MASK)
    if not options.share_first_step:
        tokens_BKL = tokens_BKL.repeat(1, options.candidates, 1)
    logprobs_BKL, ends_BKL = torch.zeros(2, utterances, options.candidates, longest, device=device)

    steps: list[Step] = []
    for step in range(options.steps):
        masked_BKL = tokens_BKL == MASK
        write_BKL, keep_BKL = uniforms_BKN2L[:, :, step].unbind(2)
        tokens_BKL, logprobs_BKL, ends_BKL = _write(
            predictor, tokens_BKL, masked_BKL, logprobs_BKL, ends_BKL, write_BKL, options.temperature
        )
        tokens_BKL, ended_BKL = _end(tokens_BKL, writable_B1L)
        # Padding may become the end of a transcript whose end is written again: it is as sure as endoftext was there.
        logprobs_BKL = torch.where(ended_BKL, ends_BKL, logprobs_BKL)
        if trace:
            steps.append(Step(masked_BKL.expand_as(tokens_BKL), tokens_BKL, logprobs_BKL))
        if step + 1 < options.steps:
            ratio = options.ratios[step + 1]
            if options.remask == "random":
                again_BKL = keep_BKL < ratio
            else:
                again_BKL = _least_confident(logprobs_BKL, writable_B1L & ~ended_BKL, ratio)
            tokens_BKL = tokens_BKL.masked_fill(again_BKL & writable_B1L, MASK)

    return Decoded(_collect(tokens_BKL, logprobs_BKL, prompt_length, canvas_B), steps)


def _write(
    predictor: Predictor,
    tokens_BKL: Tensor,
    masked_BKL: Tensor,
    logprobs_BKL: Tensor,
    ends_BKL: Tensor,
    uniforms_BKL: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write every masked position; a canvas that stands for several candidates is written once for each.

    Returns tokens, their log-probabilities, and what endoftext's would have been.
    """
    states_BKLD = predictor.states(tokens_BKL)
    draws = uniforms_BKL.shape[1] // tokens_BKL.shape[1]
    states_RD = states_BKLD[masked_BKL]
    # (R, draws): each masked position with the uniforms of all the candidates that it stands for.
    uniforms_RC = uniforms_BKL.unflatten(1, (-1, draws)).movedim(2, -1)[masked_BKL]
    written, logprobs, ends = [], [], []
    for states, uniforms in zip(states_RD.split(_ROWS_AT_ONCE), uniforms_RC.split(_ROWS_AT_ONCE), strict=True):
        logits_RV = predictor.logits(states).float()
        ids_RC, total_R1 = sample(logits_RV, uniforms, temperature)
        written.append(ids_RC)
        logprobs.append(logits_RV.gather(1, ids_RC) - total_R1)
        ends.append((logits_RV[:, ENDOFTEXT, None] - total_R1).expand_as(ids_RC))
    tokens_BKL = tokens_BKL.repeat_interleave(draws, 1)
    where = masked_BKL.nonzero(as_tuple=True)
    for draw in range(draws):
        at = (where[0], where[1] * draws + draw, where[2])
        tokens_BKL[at] = torch.cat([ids_RC[:, draw] for ids_RC in written])
        logprobs_BKL = logprobs_BKL.index_put(at, torch.cat([values[:, draw] for values in logprobs]))
        ends_BKL = ends_BKL.index_put(at, torch.cat([values[:, draw] for values in ends]))
    return tokens_BKL, logprobs_BKL, ends_BKL


def sample(logits_RV: Tensor, uniforms_RC: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw C ids per row by inverting the cumulative distribution at `temperature`; 0 takes the most likely.

    `logits_RV` are float32. Returns ids (R, C) and each row's log-sum-exp (R, 1), to make log-probabilities of logits.
    """
    top_R1, best_R1 = logits_RV.max(1, keepdim=True)
    if temperature == 0:
        ids_RC = best_R1.expand_as(uniforms_RC)
    else:
        # Below the clamp, exp gives numbers that add nothing and that a CPU is slow to handle.
        mass_RV = (logits_RV - top_R1).div_(temperature).clamp_(min=_NEGLIGIBLE).exp_().cumsum_(1)
        # A uniform of exactly 0 would draw the first id, however unlikely.
        ids_RC = torch.searchsorted(mass_RV, uniforms_RC.clamp(min=_LEAST_UNIFORM) * mass_RV[:, -1:], right=True)
        ids_RC = ids_RC.clamp_(max=logits_RV.shape[1] - 1)
    return ids_RC, logits_RV.logsumexp(1, keepdim=True)


def _end(tokens_BKL: Tensor, writable_B1L: Tensor) -> tuple[Tensor, Tensor]:
    """Turn whatever follows a candidate's first endoftext into padding (the same id); also say where that is."""
    ends_BKL = (tokens_BKL == ENDOFTEXT) & writable_B1L
    ended_BKL = (ends_BKL.cumsum(2) - ends_BKL.long()) > 0
    return tokens_BKL.masked_fill(ended_BKL, ENDOFTEXT), ended_BKL


def _least_confident(logprobs_BKL: Tensor, live_BKL: Tensor, ratio: float) -> Tensor:
    """All but the floor((1 - ratio) L) most confident of the L positions through the first endoftext."""
    # The small allowance keeps (1 - 0.8) * 10 at 2 in spite of rounding.
    keep_BK1 = ((1 - ratio) * live_BKL.sum(2, keepdim=True) + 1e-6).floor()
    order_BKL = logprobs_BKL.masked_fill(~live_BKL, -math.inf).argsort(dim=2, descending=True, stable=True)
    rank_BKL = order_BKL.argsort(dim=2)
    return rank_BKL >= keep_BK1


def _collect(
    tokens_BKL: Tensor, logprobs_BKL: Tensor, prompt_length: int, canvas_B: Sequence[int]
) -> list[list[Candidate]]:
    """Cut every canvas at its endoftext."""
    tokens, logprobs = tokens_BKL.tolist(), logprobs_BKL.tolist()
    pools: list[list[Candidate]] = []
    for row, positions in enumerate(canvas_B):
        pool = []
        for ids, values in zip(tokens[row], logprobs[row], strict=True):
            ids, values = ids[prompt_length:positions], values[prompt_length:positions]
            length = ids.index(ENDOFTEXT) if ENDOFTEXT in ids else len(ids)
            pool.append(Candidate(tuple(ids[:length]), tuple(values[: length + 1])))
        pools.append(pool)
    return pools
