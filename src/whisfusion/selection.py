"""Which of the K candidates becomes the transcript. One small protocol; every selector says what it decided by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from whisfusion.ctc import log_likelihoods
from whisfusion.errors import OptionError
from whisfusion.normalise import edit_rate, pairwise_edits, units
from whisfusion.pdd import Candidate
from whisfusion.tokenizer import get_tokenizer
from whisfusion.whisper import WhisperDecoder, log_likelihood

_RISK = 4.0
"""What an error rate of 1 to the other candidates weighs against a nat a letter; chosen on dev sets."""


@dataclass(frozen=True)
class Pool:
    """All that a selector may look at for one utterance."""

    candidates: Sequence[Candidate]
    texts: Sequence[str]
    language: str
    audio_TD: Tensor | None = None
    """The encoder's features of the utterance."""
    reference: str | None = None
    """The true transcript, which only the oracle reads."""
    likelihoods: Sequence[float] | None = None
    """Whisper's of every candidate, where the engine has worked them out already."""
    bytes_TV: Tensor | None = None
    """CTC logits of the model's adapter, of the utterance's own frames."""


@dataclass(frozen=True)
class Selection:
    """The chosen candidate, and each candidate's score: the highest won."""

    index: int
    scores: tuple[float, ...]
    risks: Sequence[float] | None = None
    """Each candidate's summed edit rate to the others, where the selector has worked it out."""


class Selector(Protocol):
    """Chooses one candidate for each of a batch of utterances."""

    def __call__(self, pools: Sequence[Pool]) -> list[Selection]:
        """One selection per pool."""
        ...


def _best(scores: Sequence[float], candidates: Sequence[Candidate]) -> Selection:
    """The highest score; ties go to the higher confidence, then to the first."""
    index = max(range(len(scores)), key=lambda i: (scores[i], candidates[i].confidence, -i))
    return Selection(index, tuple(scores))


def risks(texts: Sequence[str], language: str) -> list[float]:
    """Each text's summed edit rate to all the others, as if each of them were the truth."""
    written = [tuple(units(text, language)) for text in texts]
    # Candidates often agree: each wording is compared once.
    place = {wording: i for i, wording in enumerate(dict.fromkeys(written))}
    edits = pairwise_edits(list(place))
    total = [0.0] * len(texts)
    for i, own in enumerate(written):
        for other in written:
            total[i] += edits[place[own]][place[other]] / max(1, len(other))
    return total


class MinimumBayesRisk:
    """Consensus: the candidate nearest to all the others. Its scores are the negative risks."""

    def __call__(self, pools: Sequence[Pool]) -> list[Selection]:
        found = [risks(pool.texts, pool.language) for pool in pools]
        return [
            replace(_best([-risk for risk in pool_risks], pool.candidates), risks=pool_risks)
            for pool, pool_risks in zip(pools, found, strict=True)
        ]


class SpelledConsensus:
    """Consensus, and how well the model's adapter can spell a candidate: CTC's log-likelihood a letter, less the risk.

    A candidate's words are drawn side by side, and one of them may be there twice or not at all; CTC reads the audio
    from its start to its end, and does not find such a text in it.
    """

    def __call__(self, pools: Sequence[Pool]) -> list[Selection]:
        return [self._select(pool) for pool in pools]

    def _select(self, pool: Pool) -> Selection:
        if pool.bytes_TV is None:
            raise OptionError("selection by spelling needs a model with an adapter")
        spelled = get_tokenizer().token_bytes()
        targets = [[1 + byte for token in c.tokens for byte in spelled[token]] for c in pool.candidates]
        likely = [
            value / max(1, len(target))
            for value, target in zip(log_likelihoods(pool.bytes_TV, targets), targets, strict=True)
        ]
        pool_risks = risks(pool.texts, pool.language)
        others = max(1, len(pool_risks) - 1)
        scores = [own - _RISK * risk / others for own, risk in zip(likely, pool_risks, strict=True)]
        return replace(_best(scores, pool.candidates), risks=pool_risks)


class HighestConfidence:
    """The candidate the model was surest of, by mean log-probability of its tokens."""

    def __call__(self, pools: Sequence[Pool]) -> list[Selection]:
        return [_best([c.confidence for c in pool.candidates], pool.candidates) for pool in pools]


class Oracle:
    """The candidate with the fewest errors against the reference: an upper bound, not a system."""

    def __call__(self, pools: Sequence[Pool]) -> list[Selection]:
        if any(pool.reference is None for pool in pools):
            raise OptionError("oracle selection needs the reference transcript of every utterance")
        return [
            _best(
                [-edit_rate(text, pool.reference or "", pool.language) for text in pool.texts],
                pool.candidates,
            )
            for pool in pools
        ]


class WhisperRerank:
    """The candidate that Whisper's own decoder finds likeliest, per token, over the same encoder features."""

    def __init__(self, decoder: WhisperDecoder) -> None:
        self.decoder = decoder

    def __call__(self, pools: Sequence[Pool]) -> list[Selection]:
        scored = [pool.likelihoods for pool in pools if pool.likelihoods is not None]
        if len(scored) == len(pools):
            return [_best(scores, pool.candidates) for scores, pool in zip(scored, pools, strict=True)]
        features = [pool.audio_TD for pool in pools if pool.audio_TD is not None]
        if len(features) != len(pools):
            raise OptionError("reranking needs the encoder's features of every utterance")
        audio_BTD = pad_sequence(features, batch_first=True)
        lengths_B = torch.tensor([len(audio_TD) for audio_TD in features], device=audio_BTD.device)
        mask_BT = torch.arange(audio_BTD.shape[1], device=audio_BTD.device) < lengths_B[:, None]
        scores = log_likelihood(
            self.decoder,
            audio_BTD,
            [[candidate.tokens for candidate in pool.candidates] for pool in pools],
            [pool.language for pool in pools],
            audio_mask_BT=None if mask_BT.all() else mask_BT,
        )
        return [_best(row, pool.candidates) for row, pool in zip(scores, pools, strict=True)]
