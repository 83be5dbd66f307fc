"""A second look at a finished text, for repair: what the decoder makes of each token when it sees those beside it.

Of a text that is finished the length is known, so that anchors can cut the audio for just as many tokens. Every other
token is masked, and then the ones between: two canvases, on which each token is predicted once with both neighbours in
sight.

Letters: B utterances, L canvas positions, M choices, R positions of all utterances, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whisfusion.pdd import Candidate, Thoughts
from whisfusion.sampling import most_likely
from whisfusion.tokenizer import ENDOFTEXT, MASK, PROMPT_LENGTH

CANVASES = 2


@dataclass(frozen=True)
class Look:
    """What the decoder makes of a text: the text and how likely it finds each token, and what it would rather write."""

    candidate: Candidate
    thoughts: Thoughts
    """(n + 1, M) for n tokens."""


LookAt = Callable[[Sequence[tuple[int, ...]]], list[Look]]
"""Finished texts of a batch to what the decoder makes of them."""


@dataclass(frozen=True)
class Canvases:
    """Texts to look at."""

    written_BL: Tensor
    """Prompt, tokens, endoftext, and endoftext again up to the longest."""
    counts_B: Tensor
    """Tokens of each text, endoftext included."""

    @classmethod
    def of(cls, prompts_BP: Tensor, texts: Sequence[Sequence[int]], *, positions: int) -> "Canvases":
        """Texts after their prompts, on canvases of so many positions; all of it on the host."""
        written_BL = torch.full((len(texts), positions), ENDOFTEXT)
        written_BL[:, :PROMPT_LENGTH] = prompts_BP
        for row_L, text in zip(written_BL, texts, strict=True):
            row_L[PROMPT_LENGTH : PROMPT_LENGTH + len(text)] = torch.tensor(text, dtype=torch.int64)
        return cls(written_BL, torch.tensor([len(text) + 1 for text in texts]))


def masked(written_BL: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
    """The two canvases (B, 2, L) of every text, and where each text's own positions (B, L) are."""
    position_L = torch.arange(written_BL.shape[1], device=written_BL.device)
    own_BL = position_L < PROMPT_LENGTH + counts_B[:, None]
    canvas_21 = torch.arange(CANVASES, device=written_BL.device)[:, None]
    hidden_2L = (position_L >= PROMPT_LENGTH) & (position_L % CANVASES == canvas_21)
    return written_BL[:, None].masked_fill(hidden_2L & own_BL[:, None], MASK), own_BL


def predicted(states_B2LD: Tensor) -> Tensor:
    """The states (B, L, D) of each position on the canvas on which it was masked."""
    position_L = torch.arange(states_B2LD.shape[2], device=states_B2LD.device)
    return states_B2LD[:, position_L % CANVASES, position_L]


def read(
    logits: Callable[[slice], Tensor], columns_R: Tensor, choices: int, *, at_once: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest columns (R, M), their log-probabilities, and that of the column written at each position (R).

    `logits` gives those (..., V) of some of the positions: of at most `at_once`, since there are so many.
    """
    parts = []
    for first in range(0, len(columns_R), at_once):
        rows = slice(first, first + at_once)
        logits_RV = logits(rows).float()
        total_R1 = logits_RV.logsumexp(1, keepdim=True)
        written_R1 = logits_RV.gather(1, columns_R[rows, None]) - total_R1
        parts.append((*most_likely(logits_RV, total_R1, choices), written_R1[:, 0]))
    columns_RM, logprobs_RM, written_R = (torch.cat(values) for values in zip(*parts, strict=True))
    return columns_RM, logprobs_RM, written_R


def looks(texts: Sequence[tuple[int, ...]], thoughts: Thoughts, logprobs_BL: Tensor) -> list[Look]:
    """Each text's own part of what was read (B, L), by position after the prompt."""
    return [
        Look(Candidate(text, tuple(logprobs_BL[row, : len(text) + 1].tolist())), thoughts.of(row, slice(len(text) + 1)))
        for row, text in enumerate(texts)
    ]
