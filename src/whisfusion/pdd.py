"""Parallel Diffusion Decoding: K transcripts of an utterance, written at once, in N steps.

Knows no model: it asks a `Predictor`. All of an utterance's randomness is one small tensor of uniforms drawn from its
own seed, so that what it is batched with, and the device it runs on, do not change what is drawn.

Letters: B utterances, K candidates, N steps, L canvas positions, R positions to write of all sequences, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from whisfusion.decoder import Draft
from whisfusion.errors import OptionError
from whisfusion.sampling import sample
from whisfusion.tokenizer import ENDOFTEXT, MASK
from whisfusion.vocabulary import Columns

PAPER_TRAJECTORY = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Input mask ratios of the paper's steps; its default uses the first three."""

_LEAST_TEMPERATURE = 1e-3
"""Below this float32 overflows; 0 is greedy."""
_LOGITS_AT_ONCE = {"cpu": 1 << 21}
"""Logits over the vocabulary are the largest thing in decoding: so many exist at a time, on a CPU as many as its cache
holds."""
_MOST_LOGITS_AT_ONCE = 1 << 26
"""All of the paper's five candidates: 0.3 GB in float32."""


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


def override_options(default: PDDOptions, given: dict[str, Any]) -> PDDOptions:
    """A model's own settings with what a user gave (None: nothing); another N leaves the model's trajectory behind."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if "steps" in chosen and "trajectory" not in chosen and chosen["steps"] != default.steps:
        chosen["trajectory"] = None
    if "trajectory" in chosen and chosen["trajectory"] is not None and "steps" not in chosen:
        chosen["steps"] = len(chosen["trajectory"])
    return replace(default, **chosen)


class Predictor(Protocol):
    """The model, as decoding sees it."""

    def states(self, tokens_BKL: Tensor, draft: Draft | None) -> Tensor:
        """Hidden states (B, K, L, D) of partly masked canvases, and of what the step before wrote on them, if any."""
        ...

    def logits(self, states_RD: Tensor) -> Tensor:
        """Logits (R, V) over ids that may be written; the last column is endoftext's."""
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
    """All candidates of a batch, and the steps that led there, if they were asked for."""

    candidates: list[list[Candidate]]
    trace: list[Step]


def draw_uniforms(seed: int, options: PDDOptions, positions: int) -> Tensor:
    """An utterance's randomness (K, N, 2, L): what to write, and what to mask again.

    Candidate k's part does not depend on K, so more candidates are the same ones and some more.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(options.candidates, options.steps, 2, positions, generator=generator)


@torch.no_grad()
def parallel_decode(
    predictor: Predictor,
    prompts_BP: Tensor,
    canvas_B: Sequence[int],
    seeds_B: Sequence[int],
    options: PDDOptions,
    *,
    columns: Columns | None = None,
    trace: bool = False,
) -> Decoded:
    """Decode B utterances with canvases of `canvas_B` positions, prompt included, each from its own seed.

    `columns`: what the columns of the predictor's logits stand for; None where each is the id of its own number.
    """
    device, longest = prompts_BP.device, max(canvas_B)
    columns = Columns.all(device) if columns is None else columns
    uniforms_BKN2L = batch_uniforms(seeds_B, canvas_B, options, longest).to(device)
    tokens_B1L, writable_B1L = empty_canvas(prompts_BP, torch.tensor(list(canvas_B), device=device), longest)

    def write(*canvases: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _write(predictor, columns, *canvases, options.temperature)

    tokens_BKL, logprobs_BKL, steps = denoise(write, tokens_B1L, writable_B1L, uniforms_BKN2L, options)
    return Decoded(
        collect(tokens_BKL, logprobs_BKL, prompts_BP.shape[1], canvas_B),
        steps if trace else [],
    )


def batch_uniforms(seeds_B: Sequence[int], canvas_B: Sequence[int], options: PDDOptions, positions: int) -> Tensor:
    """The randomness of a batch (B, K, N, 2, positions), each utterance's from its own seed and for its own canvas."""
    uniforms_BKN2L = torch.zeros(len(seeds_B), options.candidates, options.steps, 2, positions)
    for row, (seed, own) in enumerate(zip(seeds_B, canvas_B, strict=True)):
        uniforms_BKN2L[row, ..., :own] = draw_uniforms(seed, options, own)
    return uniforms_BKN2L


def empty_canvas(prompts_BP: Tensor, canvas_B: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """Canvases (B, 1, positions) with nothing but the prompt written, and where each may be written."""
    prompt_length = prompts_BP.shape[1]
    position_L = torch.arange(positions, device=prompts_BP.device)
    writable_B1L = (position_L >= prompt_length) & (position_L < canvas_B[:, None, None])
    tokens_B1L = torch.full_like(writable_B1L, ENDOFTEXT, dtype=torch.int64)
    tokens_B1L[:, 0, :prompt_length] = prompts_BP
    return tokens_B1L.masked_fill(writable_B1L, MASK), writable_B1L


Write = Callable[[Tensor, Draft | None, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Writes wanted positions: tokens, what the step before wrote, wanted, log-probabilities, endoftext's and uniforms in;
tokens and both log-probabilities out, for as many candidates as there are uniforms."""


def denoise(
    write: Write, tokens_BKL: Tensor, writable_B1L: Tensor, uniforms_BKN2L: Tensor, options: PDDOptions
) -> tuple[Tensor, Tensor, list[Step]]:
    """The N steps: tokens, their log-probabilities, and what each step did. No shape depends on what is drawn."""
    if not options.share_first_step:
        tokens_BKL = tokens_BKL.repeat(1, options.candidates, 1)
    logprobs_BKL, ends_BKL = torch.zeros_like(uniforms_BKN2L[:, :, 0]).unbind(2)
    steps: list[Step] = []
    draft: Draft | None = None
    for step in range(options.steps):
        masked_BKL = tokens_BKL == MASK
        # Whatever were written behind an endoftext that is kept would be padding: it is not written.
        wanted_BKL = masked_BKL & ~ended(tokens_BKL, writable_B1L)
        write_BKL, keep_BKL = uniforms_BKN2L[:, :, step].unbind(2)
        tokens_BKL, logprobs_BKL, ends_BKL = write(tokens_BKL, draft, wanted_BKL, logprobs_BKL, ends_BKL, write_BKL)
        ended_BKL = ended(tokens_BKL, writable_B1L)
        tokens_BKL = tokens_BKL.masked_fill(ended_BKL, ENDOFTEXT)
        # Padding may become the end of a transcript whose end is written again: it is as sure as endoftext was there
        # when that was last asked.
        logprobs_BKL = torch.where(ended_BKL, ends_BKL, logprobs_BKL)
        steps.append(Step(masked_BKL.expand_as(tokens_BKL), tokens_BKL, logprobs_BKL))
        if step + 1 < options.steps:
            ratio = options.ratios[step + 1]
            draft = Draft(tokens_BKL, logprobs_BKL.exp())
            if options.remask == "random":
                again_BKL = keep_BKL < ratio
            else:
                again_BKL = _least_confident(logprobs_BKL, writable_B1L & ~ended_BKL, ratio)
            tokens_BKL = tokens_BKL.masked_fill(again_BKL & writable_B1L, MASK)
    return tokens_BKL, logprobs_BKL, steps


def _write(
    predictor: Predictor,
    columns: Columns,
    tokens_BKL: Tensor,
    draft: Draft | None,
    wanted_BKL: Tensor,
    logprobs_BKL: Tensor,
    ends_BKL: Tensor,
    uniforms_BKL: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write every wanted position; a canvas that stands for several candidates is written once for each.

    Returns tokens, their log-probabilities, and what endoftext's would have been.
    """
    states_BKLD = predictor.states(tokens_BKL, draft)
    draws = uniforms_BKL.shape[1] // tokens_BKL.shape[1]
    b_R, k_R, l_R = wanted_BKL.nonzero(as_tuple=True)
    # (R, draws): each wanted position for all the candidates that it stands for.
    at = (b_R, k_R, slice(None), l_R)
    states_RD, uniforms_RC = states_BKLD[b_R, k_R, l_R], uniforms_BKL.unflatten(1, (-1, draws))[at]
    written, logprobs, ends = [], [], []
    at_once = max(1, _LOGITS_AT_ONCE.get(states_RD.device.type, _MOST_LOGITS_AT_ONCE) // len(columns.ids_V))
    for states, uniforms, rows in zip(
        *(values.split(at_once) for values in (states_RD, uniforms_RC, b_R)), strict=True
    ):
        logits_RV = predictor.logits(states).float()
        if columns.allowed_BV is not None:
            logits_RV = logits_RV.masked_fill(~columns.allowed_BV[rows], -math.inf)
        drawn_RC, total_R1 = sample(logits_RV, uniforms, temperature)
        written.append(columns.ids_V[drawn_RC])
        logprobs.append(logits_RV.gather(1, drawn_RC) - total_R1)
        ends.append((logits_RV[:, -1:] - total_R1).expand_as(drawn_RC))
    canvases = tokens_BKL.repeat_interleave(draws, 1), logprobs_BKL.clone(), ends_BKL.clone()
    for values_BKL, new in zip(canvases, (written, logprobs, ends), strict=True):
        values_BKL.unflatten(1, (-1, draws))[at] = torch.cat(new) if len(new) > 1 else new[0]
    return canvases


def ended(tokens: Tensor, writable: Tensor) -> Tensor:
    """What follows the first endoftext of a canvas (the last dimension): padding, which is the same id."""
    ends = (tokens == ENDOFTEXT) & writable
    return ends.cumsum(-1) > ends


def _least_confident(logprobs_BKL: Tensor, live_BKL: Tensor, ratio: float) -> Tensor:
    """All but the floor((1 - ratio) L) most confident of the L positions through the first endoftext."""
    # The small allowance keeps (1 - 0.8) * 10 at 2 in spite of rounding.
    keep_BK1 = ((1 - ratio) * live_BKL.sum(2, keepdim=True) + 1e-6).floor()
    order_BKL = logprobs_BKL.masked_fill(~live_BKL, -math.inf).argsort(dim=2, descending=True, stable=True)
    rank_BKL = order_BKL.argsort(dim=2)
    return rank_BKL >= keep_BK1


def collect(
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
