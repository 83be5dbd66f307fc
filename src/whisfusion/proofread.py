"""Whisper's own decoder proofreads finished texts: a few passes over all of a text at once, never word by word.

A canvas is written side by side, and neighbours may be one place apart. Whisper's decoder, which was made to write from
left to right, reads the whole text in one pass and tells of each token how likely it is after those before it. Where it
would rather have written another one it goes on from there for a few tokens, at all such places at once, and is asked
after each how well it leads back into the text. What it would put in is then listened for: an edit is made where it
gains more with Whisper and with the CTC of the model's adapter together than a threshold. After a few rounds nothing is
left to change. How many passes that takes does not grow with the text.

Letters: B utterances, L text positions, P prompt, R places of all texts (one for each token, one for the end), A
alternatives, E tokens that an edit may replace, S spots of an utterance where Whisper goes on, V vocabulary, T audio
positions, D width.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whisfusion.blocks import Cache, KeysValues
from whisfusion.ctc import BLANK
from whisfusion.spelling import Edit, Text
from whisfusion.tokenizer import ENDOFTEXT, PROMPT_LENGTH
from whisfusion.vocabulary import Columns
from whisfusion.whisper import WhisperDecoder

# All of these were chosen on dev sets.
ROUNDS = 6
_SPELLING = 0.3
"""What a nat of CTC's weighs against one of Whisper's."""
_SURE, _GUESSING = 0.75, 0.5
"""How sure CTC is of its letters, on average, where it is believed in full, and where not at all."""
_LEAST_GAIN = 1.0
"""Nats that an edit must gain."""
_ONWARD = 14
"""Tokens that Whisper writes from a spot on, at most: it stops where it is back in the text."""
_EVERYWHERE = 3
"""So many of them on every spot, and then only on a few of them."""
_FEW = 2
_REPLACED = 5
"""Tokens of the text that an edit may replace."""
_ALTERNATIVES = 2
"""Tokens that are tried at a spot."""
_LIKELY = -2.5
"""The least log-probability of the first of them."""
_LIKELIER = -2.0
"""What it may be less likely than what is written there."""
_WORST = -6.0
"""Edits that Whisper finds so much less likely are not listened for."""
_BACK = -0.7
"""Whisper is back in the text where it finds the token that comes next there likelier, and has gained something."""
_APART = 3
"""Tokens between edits that are made at once."""
_UNKNOWN = -15.0
"""Log-probability of a token that the language's list has not, and the least of any other."""
_ROWS_AT_ONCE = 1024
"""Places for which logits over the vocabulary exist at a time."""


def proofread(
    decoder: WhisperDecoder,
    head: Callable[[Tensor], Tensor],
    columns: Columns,
    texts: Sequence[Sequence[int]],
    prompts_BP: Tensor,
    audio_BTD: Tensor,
    heard_BT: Tensor | None,
    bytes_B: Sequence[Tensor | None],
    *,
    rounds: int = ROUNDS,
) -> list[tuple[int, ...]]:
    """Texts of a batch, each after all edits that are worth it.

    head: logits over the ids of `columns`, of Whisper's states. prompts_BP: in Whisper's own ids. audio_BTD: the
    encoder's features, of which `heard_BT` are each utterance's own. bytes_B: CTC logits (T, V) of each utterance, for
    models that have them.
    """
    done = [tuple(text) for text in texts]
    heard_B = [None if bytes_TV is None else bytes_TV.detach().cpu().double().log_softmax(-1) for bytes_TV in bytes_B]
    reader = _Reader(decoder, head, columns, prompts_BP, decoder.listen(audio_BTD), heard_BT)
    room = decoder.config.positions - PROMPT_LENGTH - _ONWARD
    # Where each text is still to be looked at: at first everywhere, and then near what has changed.
    anew = {row: np.ones(len(text) + 1, dtype=bool) for row, text in enumerate(done) if 0 < len(text) <= room}
    for _ in range(rounds):
        if not anew:
            break
        rows, anew_R = list(anew), list(anew.values())
        anew = {}
        for row, edits in zip(rows, reader.of(rows).edits([done[row] for row in rows], anew_R), strict=True):
            made = _worthwhile(done[row], edits, heard_B[row])
            text, near_R = _edited(done[row], made)
            if made and len(text) <= room:
                done[row] = text
                if text:
                    anew[row] = near_R
    return done


def _worthwhile(text: Sequence[int], edits: Sequence[Edit], logp_TV: Tensor | None) -> list[Edit]:
    """The best of the edits that gain enough and do not touch each other's surroundings, in the order of the text."""
    gains = np.array([edit.gain for edit in edits])
    weight = 0.0 if logp_TV is None or not edits else _SPELLING * _credibility(logp_TV)
    if weight and logp_TV is not None and (heard := Text.of(logp_TV, text)) is not None:
        gains = gains + weight * np.array(heard.gains(edits))
    made: list[Edit] = []
    for i in np.argsort(-gains):
        if gains[i] <= _LEAST_GAIN:
            break
        if all(edits[i].first >= other.end + _APART or other.first >= edits[i].end + _APART for other in made):
            made.append(edits[i])
    return sorted(made)


def _credibility(logp_TV: Tensor) -> float:
    """From 0 to 1: how far CTC is to be believed. Of speech in a language that it hardly knows it is not sure."""
    likeliest_T, classes_T = logp_TV.max(1)
    letters_T = likeliest_T[classes_T != BLANK].exp()
    sure = letters_T.mean().item() if len(letters_T) else 1.0
    return min(1.0, max(0.0, (sure - _GUESSING) / (_SURE - _GUESSING)))


def _edited(text: Sequence[int], edits: Sequence[Edit]) -> tuple[tuple[int, ...], np.ndarray]:
    """The text after edits in its order, and which of its places (the end is one) are near to one of them."""
    parts: list[int] = []
    spans, end = [], 0
    for edit in edits:
        parts += text[end : edit.first]
        spans.append((len(parts), len(parts) + len(edit.tokens)))
        parts += edit.tokens
        end = edit.end
    parts += text[end:]
    near_R = np.zeros(len(parts) + 1, dtype=bool)
    for first, last in spans:
        near_R[max(0, first - _REPLACED) : last + _APART + 1] = True
    return tuple(parts), near_R


class _Seen(NamedTuple):
    """What Whisper makes of N places, on the host."""

    likeliest_NA: np.ndarray
    """Log-probabilities of the likeliest tokens."""
    tokens_NA: np.ndarray
    back_NE: np.ndarray
    """Log-probability of each of the tokens that the text has from here on."""


@dataclass(frozen=True)
class _Reader:
    """Whisper's decoder, listening to a batch."""

    decoder: WhisperDecoder
    head: Callable[[Tensor], Tensor]
    columns: Columns
    prompts_BP: Tensor
    memory: list[KeysValues]
    heard_BT: Tensor | None

    def of(self, rows: Sequence[int]) -> "_Reader":
        """The same, for some of the utterances."""
        if len(rows) == len(self.prompts_BP):
            return self
        ids_V, allowed_BV = self.columns.ids_V, self.columns.allowed_BV
        return replace(
            self,
            columns=Columns(ids_V, None if allowed_BV is None else allowed_BV[rows]),
            prompts_BP=self.prompts_BP[rows],
            memory=[KeysValues(*(x_BHTC[rows] for x_BHTC in layer)) for layer in self.memory],
            heard_BT=None if self.heard_BT is None else self.heard_BT[rows],
        )

    def edits(self, texts: Sequence[Sequence[int]], anew: Sequence[np.ndarray]) -> list[list[Edit]]:
        """What Whisper would change in a text of each utterance, at its places `anew`, and what it gains by that."""
        longest = max(map(len, texts))
        # After each text its end, as far as an edit may look.
        text_BL = torch.tensor([[*text, *[ENDOFTEXT] * (longest + _REPLACED + 1 - len(text))] for text in texts])
        text_BL = text_BL.to(self.prompts_BP.device)
        cache = Cache()
        tokens_BL = torch.cat((self.prompts_BP, text_BL[:, :longest]), 1)
        states_BLD = self.decoder.states(tokens_BL, self.memory, memory_mask_BT=self.heard_BT, cache=cache)
        places_BL = torch.arange(longest + 1) <= torch.tensor([[len(text)] for text in texts])
        utterance_R, place_R = places_BL.nonzero(as_tuple=True)
        seen = self._see(states_BLD[utterance_R, PROMPT_LENGTH - 1 + place_R], text_BL, utterance_R, place_R)
        ends = np.cumsum([0, *(len(text) + 1 for text in texts)])
        readings = [
            _Reading(text, anew_R, _Seen(*(part[start:end] for part in seen)))
            for text, anew_R, (start, end) in zip(texts, anew, itertools.pairwise(ends), strict=True)
        ]
        self._go_on(readings, text_BL, tokens_BL.shape[1], cache)
        return [reading.edits for reading in readings]

    def _see(self, states_ND: Tensor, text_BL: Tensor, utterance_N: Tensor, place_N: Tensor) -> _Seen:
        ids_V, allowed_BV = self.columns.ids_V, self.columns.allowed_BV
        device = ids_V.device
        utterance_N, place_N = utterance_N.to(device), place_N.to(device)
        next_NE = text_BL[utterance_N[:, None], place_N[:, None] + torch.arange(_REPLACED + 1, device=device)]
        column_NE = torch.searchsorted(ids_V, next_NE).clamp_(max=len(ids_V) - 1)
        parts = []
        for rows in torch.arange(len(states_ND), device=device).split(_ROWS_AT_ONCE):
            logits_NV = self.head(states_ND[rows]).float()
            if allowed_BV is not None:
                logits_NV = logits_NV.masked_fill(~allowed_BV[utterance_N[rows]], -torch.inf)
            total_N1 = logits_NV.logsumexp(1, keepdim=True)
            likeliest_NA, columns_NA = logits_NV.topk(_ALTERNATIVES + 1, 1)
            parts.append((likeliest_NA - total_N1, ids_V[columns_NA], logits_NV.gather(1, column_NE[rows]) - total_N1))
        likeliest_NA, tokens_NA, back_NE = (torch.cat(values) for values in zip(*parts, strict=True))
        back_NE = back_NE.masked_fill(ids_V[column_NE] != next_NE, _UNKNOWN).clamp_(min=_UNKNOWN)
        return _Seen(*(values.cpu().numpy() for values in (likeliest_NA, tokens_NA, back_NE)))

    def _go_on(self, readings: Sequence["_Reading"], text_BL: Tensor, read: int, cache: Cache) -> None:
        """Write on from spots of texts that have been read, until each has led back into its text.

        All spots of an utterance are written side by side; each sees the text before it and its own tokens.
        """
        device = text_BL.device
        columns, before = torch.arange(read, device=device), []
        for step in range(_ONWARD):
            spots = max(len(reading.open) for reading in readings)
            if not spots:
                break
            # Where an utterance has fewer, what is written on the spots that fill up is never looked at.
            number_BS = torch.tensor([[*r.open, *[-1] * (spots - len(r.open))] for r in readings])
            token_BS = torch.tensor([[*r.last(), *[0] * (spots - len(r.open))] for r in readings])
            place_BS = torch.tensor([[*r.places(), *[0] * (spots - len(r.open))] for r in readings])
            utterance_N = torch.arange(len(readings)).repeat_interleave(spots)
            number_BS, places_BS = number_BS.to(device), place_BS.to(device)
            before.append(number_BS)
            own = [number_BS[:, :, None] == earlier_BS[:, None] for earlier_BS in before]
            mask_BSL = torch.cat((columns < PROMPT_LENGTH + places_BS[..., None], *own), 2)
            states_BSD = self.decoder.states(
                token_BS.to(device),
                self.memory,
                memory_mask_BT=self.heard_BT,
                cache=cache,
                places_GL=PROMPT_LENGTH + places_BS + step,
                mask=mask_BSL[:, None],
            )
            seen = self._see(states_BSD.flatten(0, 1), text_BL, utterance_N, place_BS.flatten())
            for b, reading in enumerate(readings):
                start = b * spots
                reading.go_on(_Seen(*(part[start : start + len(reading.open)] for part in seen)))


@dataclass
class _Spot:
    """Where Whisper goes on, and what it has written there."""

    place: int
    tokens: list[int]
    logprob: float


class _Reading:
    """What Whisper would change in one text, as far as it has got."""

    def __init__(self, text: Sequence[int], anew_R: np.ndarray, seen: _Seen) -> None:
        self.edits: list[Edit] = []
        """Those that Whisper does not find much less likely, and what it gains by each."""
        self.open: list[int] = []
        """The spots that have not led back into the text yet."""
        self._text = tuple(text)
        self._own_R = np.concatenate(([0.0], np.cumsum(seen.back_NE[:, 0])))
        self._spots: list[_Spot] = []
        for place in anew_R[:-1].nonzero()[0].tolist():
            self._compare(place, (), 0.0, seen.back_NE[place])
        written_R = np.array([*text, ENDOFTEXT])
        good_RA = (seen.likeliest_NA > _LIKELY) & (seen.likeliest_NA > seen.back_NE[:, :1] + _LIKELIER)
        good_RA &= (seen.tokens_NA != written_R[:, None]) & (seen.tokens_NA != ENDOFTEXT) & anew_R[:, None]
        good_RA &= np.cumsum(good_RA, 1) <= _ALTERNATIVES
        for place, rank in zip(*good_RA.nonzero(), strict=True):
            self.open.append(len(self._spots))
            first, logprob = int(seen.tokens_NA[place, rank]), float(seen.likeliest_NA[place, rank])
            self._spots.append(_Spot(int(place), [first], logprob))

    def last(self) -> list[int]:
        """The last token of each open spot."""
        return [self._spots[number].tokens[-1] for number in self.open]

    def places(self) -> list[int]:
        """Where the open spots are."""
        return [self._spots[number].place for number in self.open]

    def go_on(self, seen: _Seen) -> None:
        """Compare what the open spots have written with the text, and write the next token of those that stay open."""
        still = []
        for number, likeliest_A, tokens_A, back_E in zip(self.open, *seen, strict=True):
            spot = self._spots[number]
            back = self._compare(spot.place, tuple(spot.tokens), spot.logprob, back_E)
            rank = int(tokens_A[0] == ENDOFTEXT)
            if back or (rank and spot.place + _REPLACED >= len(self._text)):
                continue
            spot.tokens.append(int(tokens_A[rank]))
            spot.logprob += float(likeliest_A[rank])
            # All that it could gain is what costs something now.
            if (
                spot.logprob - self._own_R[min(spot.place + _REPLACED, len(self._text)) + 1] + self._own_R[spot.place]
                > _WORST
            ):
                still.append(number)
        if still and len(self._spots[still[0]].tokens) > _EVERYWHERE:
            still = sorted(still, key=lambda number: -self._spots[number].logprob)[:_FEW]
        self.open = still

    def _compare(self, place: int, tokens: tuple[int, ...], logprob: float, back_E: np.ndarray) -> bool:
        """Note edits that put `tokens` in the place of as many as an edit may replace; whether one is surely good.

        An edit ends where the text goes on: the first token of the rest is part of what is compared.
        """
        count = min(_REPLACED, len(self._text) - place)
        back_E = back_E[: count + 1]
        gain_E = logprob + back_E - (self._own_R[place + 1 : place + count + 2] - self._own_R[place])
        for replaced in (gain_E > _WORST).nonzero()[0].tolist():
            if tokens != self._text[place : place + replaced]:
                self.edits.append(Edit(place, place + replaced, tokens, (), float(gain_E[replaced])))
        return bool(((gain_E > 0) & (back_E > _BACK)).any())
