"""What becomes of candidates once they are drawn: pools to choose from, and what is heard."""

from collections.abc import Sequence
from typing import Any

from whisfusion.pdd import Candidate, UtteranceStep
from whisfusion.selection import Pool, Selection, risks
from whisfusion.tokenizer import get_tokenizer
from whisfusion.transcript import Alternative, Heard
from whisfusion.words import Word


def pool_of(candidates: Sequence[Candidate], language: str, **known: Any) -> Pool:
    """Candidates with their texts, and whatever else is `known` to their selector."""
    texts = [get_tokenizer().decode(candidate.tokens) for candidate in candidates]
    return Pool(candidates, texts, language, **known)


def heard_of(
    pool: Pool,
    selection: Selection,
    tokens: tuple[int, ...],
    words: tuple[Word, ...],
    trace: tuple[UtteranceStep, ...],
) -> Heard:
    """What was chosen, as `tokens` has it after it was proofread, and all candidates beside it as they were drawn."""
    chosen: Candidate = pool.candidates[selection.index]
    text = pool.texts[selection.index] if tokens == chosen.tokens else get_tokenizer().decode(tokens)
    pool_risks = selection.risks or risks(pool.texts, pool.language)
    others = len(pool.candidates) - 1
    return Heard(
        language=pool.language,
        # A character of which a part is missing cannot be read.
        text=text.replace("\ufffd", "").strip(),
        tokens=tokens,
        avg_logprob=chosen.confidence,
        no_speech_prob=sum(not candidate.tokens for candidate in pool.candidates) / len(pool.candidates),
        candidates=tuple(
            Alternative(text, candidate.confidence, risk, score)
            for text, candidate, risk, score in zip(
                pool.texts, pool.candidates, pool_risks, selection.scores, strict=True
            )
        ),
        agreement=1 - min(1.0, pool_risks[selection.index] / others) if others else None,
        complete=chosen.complete,
        words=words,
        trace=trace,
    )
