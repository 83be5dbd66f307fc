"""What becomes of candidates once they are drawn: pools to choose from, repair of what was chosen, what is heard."""

from collections.abc import Mapping, Sequence
from typing import Any

from whisfusion.lexicon import WordList
from whisfusion.look import LookAt
from whisfusion.pdd import Candidate, Thoughts, UtteranceStep
from whisfusion.repair import repair
from whisfusion.selection import Pool, Selection, risks
from whisfusion.tokenizer import PROMPT_LENGTH, get_tokenizer
from whisfusion.transcript import Alternative, Heard
from whisfusion.trigrams import Trigrams
from whisfusion.words import Word


def pool_of(candidates: Sequence[Candidate], language: str, **known: Any) -> Pool:
    """Candidates with their texts, and whatever else is `known` to their selector."""
    texts = [get_tokenizer().decode(candidate.tokens) for candidate in candidates]
    return Pool(candidates, texts, language, **known)


def own_thoughts(thoughts: Thoughts | None, canvas_B: Sequence[int]) -> list[Thoughts | None]:
    """Each utterance's own thoughts, of the positions after the prompt."""
    if thoughts is None:
        return [None] * len(canvas_B)
    return [thoughts.of(row, slice(PROMPT_LENGTH, positions)) for row, positions in enumerate(canvas_B)]


def heard_of(
    pool: Pool,
    selection: Selection,
    tokens: tuple[int, ...],
    words: tuple[Word, ...],
    trace: tuple[UtteranceStep, ...],
) -> Heard:
    """What was chosen, as `tokens` has it after it was mended, and all candidates beside it as they were drawn."""
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


def mended(
    pools: Sequence[Pool],
    chosen: Sequence[Candidate],
    lexicon: Mapping[str, WordList],
    grammar: Mapping[str, Trigrams],
    *,
    look: LookAt | None,
    looks: int,
    room: int,
) -> list[tuple[int, ...]]:
    """What was chosen of each pool, repaired; looked at and repaired again so many times, where it has `room`."""

    def mend(pool: Pool, candidate: Candidate, others: Sequence[Candidate], thoughts: Thoughts) -> tuple[int, ...]:
        assert pool.bytes_TV is not None
        words, trigrams = lexicon.get(pool.language), grammar.get(pool.language)
        return repair(candidate, others, thoughts, pool.bytes_TV, words=words, trigrams=trigrams)

    texts = []
    for pool, candidate in zip(pools, chosen, strict=True):
        assert pool.thoughts is not None
        texts.append(mend(pool, candidate, pool.candidates, pool.thoughts))
    for _ in range(looks):
        assert look is not None
        shown = [text if len(text) <= room else () for text in texts]
        seen = zip(pools, texts, shown, look(shown), strict=True)
        texts = [mend(pool, it.candidate, (), it.thoughts) if can else text for pool, text, can, it in seen]
    return texts
