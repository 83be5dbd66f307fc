"""How tokens follow each other: probabilities that sum to one, gains of edits, and how counts are kept."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whisfusion.errors import ModelError
from whisfusion.tokenizer import ENDOFTEXT
from whisfusion.trigrams import EDGE, Grammar, Trigrams


def some_texts(seed: int = 0, tokens: int = 30) -> list[list[int]]:
    """Of a few tokens, each of which likes to be followed by the next."""
    rng = random.Random(seed)
    texts = []
    for _ in range(200):
        text = [rng.randrange(tokens)]
        while rng.random() < 0.8:
            text.append((text[-1] + 1) % tokens if rng.random() < 0.7 else rng.randrange(tokens))
        texts.append(text)
    return texts


def text_logprob(trigrams: Trigrams, tokens: list[int]) -> float:
    line = [EDGE, EDGE, *tokens, EDGE]
    return trigrams.logprobs(np.array([line[i : i + 3] for i in range(len(line) - 2)])).sum()


@pytest.mark.parametrize("context", [(3, 4), (3, 29), (40_000, 3), (40_000, 40_001), (EDGE, EDGE)])
def test_what_may_follow_sums_to_one(context: tuple[int, int]):
    trigrams = Trigrams.count(some_texts())
    threes = np.array([[*context, last] for last in range(ENDOFTEXT + 1)])
    # Counts are kept to within a fifth.
    assert np.exp(trigrams.logprobs(threes)).sum() == pytest.approx(1.0, abs=0.1)


def test_it_prefers_what_it_has_seen():
    trigrams = Trigrams.count(some_texts())
    usual, odd = [5, 6, 7, 8], [5, 9, 2, 8]
    assert text_logprob(trigrams, usual) > text_logprob(trigrams, odd) > text_logprob(trigrams, [40_000] * 4)


def test_rare_triples_are_forgotten_and_pairs_are_not():
    texts = [[1, 2, 3], [1, 2, 3], [1, 2, 4]]
    trigrams = Trigrams.count(texts)
    first, second = trigrams.logprobs(np.array([[1, 2, 3], [1, 2, 4]]))
    everything = Trigrams.count(texts, least=1).logprobs(np.array([[1, 2, 4]]))
    unseen = trigrams.logprobs(np.array([[1, 2, 5]]))
    assert first > everything > second > unseen


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_gain_is_the_difference_of_whole_texts(data: st.DataObject):
    trigrams = Trigrams.count(some_texts())
    token = st.integers(0, 31)
    text = data.draw(st.lists(token, max_size=8))
    edits = []
    for _ in range(data.draw(st.integers(0, 4))):
        first = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(first, len(text)))
        edits.append((first, end, tuple(data.draw(st.lists(token, max_size=3)))))
    gains = trigrams.gains(text, edits)
    assert gains.shape == (len(edits),)
    for gain, (first, end, new) in zip(gains, edits, strict=True):
        edited = [*text[:first], *new, *text[end:]]
        assert gain == pytest.approx(text_logprob(trigrams, edited) - text_logprob(trigrams, text), abs=1e-9)


def test_counts_are_kept_as_they_are_used():
    trigrams = Trigrams.count(some_texts())
    again = Trigrams.unpack(trigrams.pack())
    threes = np.random.default_rng(0).integers(0, 32, (500, 3))
    np.testing.assert_allclose(again.logprobs(threes), trigrams.logprobs(threes), rtol=1e-12)
    assert torch.equal(again.pack(), trigrams.pack())


def test_counts_add_up():
    first, second = some_texts(1), some_texts(2)
    both = Trigrams.count([*first, *second], least=1)
    summed = Trigrams.count(first, least=1) + Trigrams.count(second, least=1)
    np.testing.assert_array_equal(summed.pairs_P, both.pairs_P)
    np.testing.assert_array_equal(summed.triples_T, both.triples_T)
    # Each count is rounded once more: to the next one at most.
    for counts, expected in (
        (summed.pair_counts_P, both.pair_counts_P),
        (summed.triple_counts_T, both.triple_counts_T),
    ):
        np.testing.assert_allclose(np.log2(counts), np.log2(expected), atol=0.5)


def test_no_text_is_no_mistake():
    nothing = Trigrams.count([])
    assert np.isfinite(nothing.logprobs(np.array([[1, 2, 3]]))).all()
    assert nothing.gains([], [(0, 0, (1,))]).shape == (1,)
    assert len(Trigrams.unpack(nothing.pack()).triples_T) == 0


@pytest.mark.parametrize("octets", [b"", b"nothing of the kind"])
def test_what_is_not_counts_is_refused(octets: bytes):
    grammar = Grammar({"en": torch.tensor(list(octets), dtype=torch.uint8)})
    with pytest.raises(ModelError, match="cannot be read"):
        grammar["en"]


def test_a_grammar_unpacks_a_language_when_it_is_asked_for():
    grammar = Grammar.of({"en": Trigrams.count(some_texts(1)), "de": Trigrams.count(some_texts(2))})
    assert set(grammar) == {"en", "de"}
    assert grammar["en"] is grammar["en"]
    assert grammar.get("fr") is None
    assert {name: len(packed) for name, packed in grammar.pack().items()}.keys() == {"en", "de"}
