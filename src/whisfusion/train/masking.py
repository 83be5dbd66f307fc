"""Everything that is random in a step, drawn on the host for the rows of all ranks, and what it makes of them.

Letters: B utterances, L canvas positions, R positions to predict, S rows of the whole step (letters of a spelling in
letters_BS), N random numbers.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whisfusion.data.batch import Batch
from whisfusion.diffusion import MaskRatios, corrupt, loss_weights
from whisfusion.tokenizer import ENDOFTEXT, MASK, PROMPT_LENGTH, get_tokenizer

LANGUAGE_POSITION = 1
"""Where the prompt has its language token."""
BINS = 10
"""Bins of mask ratios that the loss is also reported by: [0, 0.1), [0.1, 0.2) ..."""

_ROWS_MULTIPLE = 1024
"""On a GPU R is rounded up to this: few shapes, and sizes that matrix units like."""

_LETTERS_MULTIPLE = 128
"""The longest spelling of a batch is rounded up to this: again few shapes."""


@dataclass(frozen=True)
class Masked:
    """A micro-batch after masking, on the device."""

    tokens_BL: Tensor
    """What the decoder reads."""
    canvas_BL: Tensor
    """Each utterance's own canvas."""
    counts_B: Tensor
    """Tokens of each transcript, endoftext included."""
    valid_B: Tensor
    """Whether the utterance is part of the loss: its clip could be read."""
    where_R: Tensor
    """Positions to predict, in tokens_BL laid out in a line."""
    targets_R: Tensor
    """The tokens there."""
    weights_R: Tensor
    """Their shares of the objective; 0 where R was rounded up."""
    bins_R: Tensor
    """The bin of their utterance's mask ratio."""
    bin_counts: Tensor
    """Utterances in each bin."""
    languages_B: Tensor
    """The true language tokens."""
    language_masked_B: Tensor
    """Whether the language is to be predicted."""
    drafted_B: Tensor
    """Whether the utterance sees a draft, where the decoder takes drafts."""
    own_B: Tensor
    """Whether what is not masked is the draft's, mistakes and all, and not the truth."""
    augment_BN: Tensor
    """Random numbers for SpecAugment."""
    letters_BS: Tensor
    """Bytes of the transcripts as CTC classes, for the adapter; of no width where there is none."""
    letter_counts_B: Tensor
    """How many they are."""
    written_BS: Tensor
    """How many tokens, in parts too, are written with each of them."""


def mask_step(
    batches: Sequence[Batch],
    ratios: MaskRatios,
    *,
    language_share: float,
    draft_share: float,
    own_share: float,
    augment_numbers: int,
    letters: bool,
    generator: torch.Generator,
    device: torch.device,
) -> list[Masked]:
    """Mask the micro-batches of a step.

    Numbers are drawn for all S rows of the step, whichever rank has them: with the same `generator` (of the
    CPU) any number of ranks masks the same positions. Nothing here waits for the device.
    """
    total, positions = batches[0].total_rows, batches[0].targets.tokens_BL.shape[1]
    rows_B = torch.cat([batch.rows_B for batch in batches])
    # Rows of other ranks are empty here: nothing of them is used but the random numbers they take.
    tokens_SL = torch.full((total, positions), ENDOFTEXT)
    tokens_SL[rows_B] = torch.cat([batch.targets.tokens_BL for batch in batches])
    scored_SL, canvas_SL = torch.zeros(2, total, positions, dtype=torch.bool)
    scored_SL[rows_B] = torch.cat([batch.targets.scored_BL for batch in batches])
    canvas_SL[rows_B] = torch.cat([batch.targets.canvas_BL for batch in batches])
    canvas_SL[:, :PROMPT_LENGTH] = False

    ratio_S = ratios.draw(total, generator=generator)
    corrupted_SL = corrupt(tokens_SL, canvas_SL, scored_SL, ratio_S, generator=generator)
    language_S = torch.rand(total, generator=generator) < language_share
    augment_SN = torch.rand(total, augment_numbers, generator=generator)
    drafted_S, own_S = torch.rand(2, total, generator=generator)
    drafted_S = drafted_S < draft_share
    own_S = drafted_S & (own_S < own_share)
    choices = {"language_masked_B": language_S, "drafted_B": drafted_S, "own_B": own_S, "augment_BN": augment_SN}
    return [
        _masked(
            batch,
            corrupted_SL[rows],
            ratio_S[rows],
            {name: values_S[rows] for name, values_S in choices.items()},
            letters,
            device,
        )
        for batch in batches
        for rows in (batch.rows_B,)
    ]


def _masked(
    batch: Batch,
    tokens_BL: Tensor,
    ratio_B: Tensor,
    choices: dict[str, Tensor],
    letters: bool,
    device: torch.device,
) -> Masked:
    targets = batch.targets
    weights_BL = loss_weights(tokens_BL, targets.scored_BL)
    where_R = weights_BL.flatten().nonzero()[:, 0]
    spare = -len(where_R) % (_ROWS_MULTIPLE if device.type == "cuda" else 1)
    where_R = torch.cat((where_R, where_R.new_zeros(spare)))
    weights_R = weights_BL.flatten()[where_R]
    weights_R[len(weights_R) - spare :] = 0.0
    valid_B = targets.scored_BL.any(1)
    bin_B = (ratio_B * BINS).long().clamp(max=BINS - 1)
    language_B = choices["language_masked_B"] & valid_B
    letters_BS, letter_counts_B, written_BS = spell(targets.tokens_BL, targets.scored_BL & letters)
    on_device = choices | {
        "tokens_BL": torch.where(
            language_B[:, None] & (torch.arange(tokens_BL.shape[1]) == LANGUAGE_POSITION), MASK, tokens_BL
        ),
        "canvas_BL": targets.canvas_BL,
        "counts_B": targets.counts_B,
        "valid_B": valid_B,
        "where_R": where_R,
        "targets_R": targets.tokens_BL.flatten()[where_R],
        "weights_R": weights_R,
        "bins_R": bin_B[where_R // tokens_BL.shape[1]],
        "bin_counts": torch.bincount(bin_B[valid_B], minlength=BINS).float(),
        "languages_B": targets.tokens_BL[:, LANGUAGE_POSITION],
        "language_masked_B": language_B,
        "letters_BS": letters_BS,
        "letter_counts_B": letter_counts_B,
        "written_BS": written_BS,
    }
    return Masked(**{name: to_device(tensor, device) for name, tensor in on_device.items()})


def spell(tokens_BL: Tensor, scored_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of the scored text as CTC classes (B, S), 0 (the blank) beyond them, and their numbers (B,).

    Then how many tokens are written with each byte (B, S): the second of four bytes of the third token makes it 2.5.
    """
    flat, firsts_V, counts_V = _spelling()
    text_BL = scored_BL & (tokens_BL < ENDOFTEXT)
    ids_N, row_N = tokens_BL[text_BL], text_BL.nonzero()[:, 0]
    counts_N = counts_V[ids_N]
    counts_B = torch.zeros(len(tokens_BL), dtype=torch.long).index_add(0, row_N, counts_N)
    longest = int(counts_B.max()) if len(ids_N) else 0
    letters_BS = torch.zeros(len(tokens_BL), -(-longest // _LETTERS_MULTIPLE) * _LETTERS_MULTIPLE, dtype=torch.long)
    # The token of each letter, and its place in it.
    of_M = torch.arange(len(ids_N)).repeat_interleave(counts_N)
    within_M = torch.arange(len(of_M)) - (counts_N.cumsum(0) - counts_N)[of_M]
    spelled_BS = torch.arange(letters_BS.shape[1]) < counts_B[:, None]
    letters_BS[spelled_BS] = 1 + flat[firsts_V[ids_N][of_M] + within_M]
    written_BS = torch.zeros(letters_BS.shape)
    before_N = (text_BL.cumsum(1) - 1)[text_BL]
    written_BS[spelled_BS] = before_N[of_M] + (within_M + 1) / counts_N[of_M]
    return letters_BS, counts_B, written_BS


@functools.cache
def _spelling() -> tuple[Tensor, Tensor, Tensor]:
    """All tokens' bytes in a line, where each begins and how many it has."""
    spelled = get_tokenizer().token_bytes()
    counts_V = torch.tensor([len(piece) for piece in spelled])
    return torch.tensor(list(b"".join(spelled))), counts_V.cumsum(0) - counts_V, counts_V


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor without waiting for the copy, or for the work before it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
