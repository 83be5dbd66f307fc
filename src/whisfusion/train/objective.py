"""From what the encoder heard and a masked transcript to the terms of the loss.

Letters: B utterances, L canvas positions, T audio positions, D width, R positions to predict, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion.ctc import ctc_loss, ctc_loss_and_places
from whisfusion.decoder import DiffusionDecoder, Draft
from whisfusion.diffusion import diffusion_loss, position_losses, quantity_loss
from whisfusion.memory import AudioMemory
from whisfusion.pdd import ended
from whisfusion.tokenizer import ENDOFTEXT, LANGUAGES, MASK, PROMPT_LENGTH, SAMPLEABLE, get_tokenizer
from whisfusion.train.masking import BINS, LANGUAGE_POSITION, Masked

Learns = Literal["all", "adapter", "speller"]

_PLACING_SPANS = (2, 8, 32, 128)
"""Audio positions over which tokens are counted."""

_VOCAB_MULTIPLE = 64
"""Matrix units want rows of whole 128 bytes; the vocabulary is odd."""


@dataclass(frozen=True)
class Terms:
    """Sums over the utterances of a micro-batch: to be divided by a step's number of them over all ranks."""

    diffusion: Tensor
    """The paper's objective."""
    quantity: Tensor
    """How far the anchors' token counts are off, relative to the true ones."""
    language: Tensor
    """Cross-entropy of the language tokens that were masked."""
    ctc: Tensor
    """Cross-entropy of what adapter and speller spell, a letter; the mean over the layers that spell."""
    placing: Tensor
    """How far, in tokens, the anchors are from where CTC hears the transcript's; where that is asked for."""
    consistency: Tensor
    """How far what is spelled of two draws of augmentation is apart, a letter; where that is asked for."""
    by_bin: Tensor
    """The first by bins of the mask ratio, without gradient."""


class Objective(nn.Module):
    """The decoder and its loss in one forward pass: the unit that is sharded over ranks."""

    def __init__(
        self,
        decoder: DiffusionDecoder,
        *,
        learns: Learns = "all",
        adapted: bool = False,
        label_smoothing: float = 0.0,
        languages: bool = False,
        placing: bool = False,
        consistency: bool = False,
        compiled: bool = False,
    ) -> None:
        """`learns`: of an adapter or a speller the CTC is all there is to the loss. `adapted`: whether what is given is
        what the adapter hears, and not the encoder. `languages`: whether masked language tokens are predicted.
        `placing`: whether CTC tells the anchors where tokens are. `consistency`: whether what is given are two draws of
        augmentation, one after the other. `compiled`: whether to fuse head and loss.
        """
        super().__init__()
        self.decoder = decoder
        self.learns = learns
        self.adapted = adapted
        self.label_smoothing = label_smoothing
        self.languages = languages
        self.placing = placing
        self.consistency = consistency
        self._losses = torch.compile(head_losses, dynamic=True) if compiled else head_losses
        self._likeliest = torch.compile(likeliest, dynamic=True) if compiled else likeliest

    def forward(self, audio_BTD: Tensor, heard_BT: Tensor | None, masked: Masked, ahead: Tensor | None = None) -> Terms:
        """`heard_BT` is None where every audio position counts; `ahead` is the decoder's."""
        decoder, config = self.decoder, self.decoder.config
        if self.learns != "all":
            memory = self._spelled(audio_BTD, heard_BT)
            apart = None
            if self.consistency:
                memory, apart = _of_two_draws(memory, masked)
            ctc, _ = _spelling_loss(memory, masked, placing=False)
            nothing = torch.zeros_like(ctc)
            return Terms(
                nothing, nothing, nothing, ctc, nothing, nothing if apart is None else apart, nothing.new_zeros(BINS)
            )
        memory = decoder.listen(audio_BTD, heard_BT, positions=masked.tokens_BL.shape[1], counts_B=masked.counts_B)
        # A canvas that is always full needs no mask, and attention without one is faster.
        canvas_BL = None if config.canvas.rule == "fixed" else masked.canvas_BL
        tokens_BL, draft = masked.tokens_BL, None
        if config.drafts:
            tokens_BL, draft = self._draft(masked, memory, canvas_BL, ahead)
        states_BLD = decoder(tokens_BL, memory, canvas_BL, ahead, draft)
        losses_R = self._losses(
            states_BLD.flatten(0, 1)[masked.where_R], decoder.output_weight, masked.targets_R, self.label_smoothing
        )
        quantity = language = ctc = placing = losses_R.new_zeros(())
        if memory.amounts_BT is not None:
            quantity_B = memory.amounts_BT.sum(1)
            # An utterance outside the loss counts as heard right.
            counts_B = torch.where(masked.valid_B, masked.counts_B, quantity_B.detach())
            quantity = quantity_loss(quantity_B, counts_B) * len(counts_B)
        if self.languages:
            language = self._language_loss(states_BLD[:, LANGUAGE_POSITION], masked)
        if memory.bytes_BTV is not None:
            ctc, places_BT2 = _spelling_loss(memory, masked, placing=self.placing)
            if places_BT2 is not None:
                placing = _placing_loss(memory, places_BT2, masked)
        shares_R = losses_R.detach() * masked.weights_R
        by_bin = losses_R.new_zeros(BINS).index_add(0, masked.bins_R, shares_R)
        nothing = torch.zeros_like(ctc)
        return Terms(diffusion_loss(losses_R, masked.weights_R), quantity, language, ctc, placing, nothing, by_bin)

    def _spelled(self, audio_BTD: Tensor, heard_BT: Tensor | None) -> AudioMemory:
        """The spelling of the part that learns alone."""
        if self.adapted:
            return self.decoder.spell(AudioMemory([], heard_BT, audio_BTD))
        memory = self.decoder.hear(audio_BTD, heard_BT)
        return replace(memory, earlier=()) if self.learns == "speller" else memory

    @torch.no_grad()
    def _draft(
        self, masked: Masked, memory: AudioMemory, canvas_BL: Tensor | None, ahead: Tensor | None
    ) -> tuple[Tensor, Draft]:
        """What a first step would write, for those who see it, and the canvases with what those keep of it."""
        tokens_BL = masked.tokens_BL
        writable_BL = masked.canvas_BL & (torch.arange(tokens_BL.shape[1], device=tokens_BL.device) >= PROMPT_LENGTH)
        states_BLD = self.decoder(tokens_BL.masked_fill(writable_BL, MASK), memory, canvas_BL, ahead)
        found, sure, end = self._likeliest(states_BLD.flatten(0, 1), self.decoder.output_weight)
        found_BL = torch.where(writable_BL, found.view_as(tokens_BL), tokens_BL)
        ended_BL = ended(found_BL, writable_BL)
        found_BL = found_BL.masked_fill(ended_BL, ENDOFTEXT)
        sure_BL = torch.where(ended_BL, end.view_as(tokens_BL), sure.view_as(tokens_BL)) * masked.drafted_B[:, None]
        kept_BL = masked.own_B[:, None] & writable_BL & (tokens_BL != MASK)
        return torch.where(kept_BL, found_BL, tokens_BL), Draft(found_BL, sure_BL)

    def _language_loss(self, states_BD: Tensor, masked: Masked) -> Tensor:
        first = get_tokenizer().language_id(next(iter(LANGUAGES)))
        logits_BV = self.decoder.logits(states_BD, slice(first, first + len(LANGUAGES)))
        losses_B = position_losses(logits_BV, masked.languages_B - first)
        return diffusion_loss(losses_B, masked.language_masked_B.float())


def _spelling_loss(memory: AudioMemory, masked: Masked, *, placing: bool) -> tuple[Tensor, Tensor | None]:
    """CTC over each utterance's own audio, as a mean over its letters, so that it weighs as much as a token's loss.

    Where nothing is said every audio position has to say so, and the mean is over them. Of several layers that spelled
    it is the mean. With `placing` also where the last layer hears the tokens: `ctc_loss_and_places`.
    """
    assert memory.bytes_BTV is not None
    spelled, frames_B = (*memory.earlier, memory.bytes_BTV), memory.spelled_positions()
    layers, places = len(spelled), None
    # All layers at once: CTC walks from frame to frame, and a GPU has room for more utterances beside these.
    targets = (masked.letters_BS, frames_B, masked.letter_counts_B)
    inputs = (torch.cat(spelled), *(torch.cat((part,) * layers) for part in targets))
    if placing:
        losses, places = ctc_loss_and_places(*inputs, torch.cat((masked.written_BS,) * layers))
    else:
        losses = ctc_loss(*inputs)
    losses_B = losses.unflatten(0, (layers, -1)).mean(0)
    return _a_letter(losses_B, frames_B, masked), None if places is None else places[-len(frames_B) :]


def _a_letter(losses_B: Tensor, frames_B: Tensor, masked: Masked) -> Tensor:
    """The sum over utterances of losses a letter; where nothing is said, a frame."""
    terms_B = torch.where(masked.letter_counts_B > 0, masked.letter_counts_B, frames_B.clamp(min=1))
    return (losses_B / terms_B * masked.valid_B).sum()


def _of_two_draws(memory: AudioMemory, masked: Masked) -> tuple[AudioMemory, Tensor]:
    """Utterances of whose 2 B the second half are the first ones in another draw of augmentation: what was spelled of B
    of them, the other draw as if by more layers; and how far the draws are apart in it, frame by frame (CR-CTC).

    Each draw is to come to where the other is, which does not move. It is the mean over the layers that spell.
    """
    assert memory.bytes_BTV is not None
    draws = [spelled_BTV.chunk(2) for spelled_BTV in (*memory.earlier, memory.bytes_BTV)]
    *earlier, last = [spelled_BTV for pair in draws for spelled_BTV in pair]
    heard_BT = None if memory.heard_BT is None else memory.heard_BT.chunk(2)[0]
    memory = AudioMemory([], heard_BT, bytes_BTV=last, earlier=tuple(earlier))
    frames_B = memory.spelled_positions()
    own_BT = torch.arange(last.shape[1], device=last.device) < frames_B[:, None]
    apart = []
    for pair in draws:
        one_BTV, other_BTV = (spelled_BTV.log_softmax(-1, dtype=torch.float32) for spelled_BTV in pair)
        apart_BT = _divergence(one_BTV, other_BTV.detach()) + _divergence(other_BTV, one_BTV.detach())
        apart.append(_a_letter((apart_BT * own_BT).sum(1) / 2, frames_B, masked))
    return memory, torch.stack(apart).mean(0)


def _divergence(logp_BTV: Tensor, target_logp_BTV: Tensor) -> Tensor:
    return F.kl_div(logp_BTV, target_logp_BTV, reduction="none", log_target=True).sum(-1)


def _placing_loss(memory: AudioMemory, places_BT2: Tensor, masked: Masked) -> Tensor:
    """How far what the anchors hear is from what CTC hears, in tokens: over spans of several lengths up to each audio
    position, so that a token too many somewhere is blamed on its own surroundings.
    """
    assert memory.amounts_BT is not None
    # CTC may spell several times for each audio position: what counts is where it is at the end of them.
    each = places_BT2.shape[1] // memory.amounts_BT.shape[1]
    written_BT, past_BT = places_BT2[:, each - 1 :: each].unbind(-1)
    heard_BT = memory.heard_BT if memory.heard_BT is not None else torch.ones_like(past_BT, dtype=torch.bool)
    # Endoftext is what follows the last letter.
    written_BT = written_BT + past_BT.cumsum(1) / past_BT.sum(1, keepdim=True).clamp(min=1e-3)
    off_BT = memory.amounts_BT.cumsum(1) - written_BT
    # Without a path through its frames CTC knows nothing of an utterance.
    counted_BT = heard_BT & (masked.valid_B & places_BT2.flatten(1).any(1))[:, None]
    spans = [off_BT - F.pad(off_BT, (span, 0))[:, : off_BT.shape[1]] for span in _PLACING_SPANS]
    apart_BT = torch.stack(spans).abs().mean(0) * counted_BT
    return (apart_BT.sum(1) / counted_BT.sum(1).clamp(min=1)).sum()


def head_losses(states_RD: Tensor, head_VD: Tensor, targets_R: Tensor, label_smoothing: float) -> Tensor:
    """`position_losses` over the whole vocabulary, of whose logits nothing outlives the call."""
    return position_losses(_logits(states_RD, head_VD), targets_R, label_smoothing=label_smoothing)


def likeliest(states_RD: Tensor, head_VD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely tokens (R,) that may be written, their probabilities, and those of endoftext."""
    logits_RV = _logits(states_RD, head_VD[:SAMPLEABLE]).float()
    top_R, tokens_R = logits_RV.max(1)
    total_R = logits_RV.logsumexp(1)
    return tokens_R, (top_R - total_R).exp(), (logits_RV[:, ENDOFTEXT] - total_R).exp()


def _logits(states_RD: Tensor, head_VD: Tensor) -> Tensor:
    vocabulary = head_VD.shape[0]
    # The rows added for speed are no parameters, and their columns are cut off before anything is summed.
    padded_VD = F.pad(head_VD, (0, 0, 0, -vocabulary % _VOCAB_MULTIPLE))
    return F.linear(states_RD, padded_VD)[:, :vocabulary]
