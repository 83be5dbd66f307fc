import itertools
from dataclasses import replace

import jiwer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whisfusion.ctc import CLASSES, byte_targets
from whisfusion.errors import OptionError
from whisfusion.normalise import normalise
from whisfusion.pdd import Candidate
from whisfusion.selection import (
    HighestConfidence,
    MinimumBayesRisk,
    Oracle,
    Pool,
    SpelledConsensus,
    WhisperRerank,
    risks,
)
from whisfusion.tokenizer import get_tokenizer
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig, log_likelihood

FLOAT_TOLERANCE = 1e-9
LIKELIHOOD_TOLERANCE = 1e-4


def pool(texts, language="en", confidences=None, reference=None, audio=None):
    confidences = confidences or [-0.1] * len(texts)
    candidates = [Candidate(tuple(get_tokenizer().encode(t)), (c,)) for t, c in zip(texts, confidences, strict=True)]
    return Pool(candidates, texts, language, audio, reference)


def brute_force_risks(texts, language):
    """By jiwer, over all ordered pairs."""
    rate = jiwer.cer if language in ("zh", "ja", "ko") else jiwer.wer
    clean = [normalise(text, language) for text in texts]
    if rate is jiwer.cer:
        clean = [text.replace(" ", "") for text in clean]
    total = [0.0] * len(texts)
    for i, j in itertools.permutations(range(len(texts)), 2):
        # jiwer refuses an empty reference; our rule divides by 1 there.
        units = len(clean[i]) if rate is jiwer.cer else len(clean[i].split())
        total[i] += rate(clean[j], clean[i]) if clean[j] else float(units)
    return total


words = st.lists(
    st.sampled_from(["a", "cat", "sat", "on", "the", "mat", "two", "2", "Colour", "color"]), max_size=7
).map(" ".join)
characters = st.text(alphabet="今天气很好我们 去。", max_size=10)


@settings(max_examples=60, deadline=None)
@given(st.lists(words, min_size=1, max_size=6))
def test_word_risks_equal_brute_force_with_jiwer(texts):
    assert risks(texts, "en") == pytest.approx(brute_force_risks(texts, "en"), abs=FLOAT_TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(st.lists(characters, min_size=1, max_size=6))
def test_character_risks_equal_brute_force_with_jiwer(texts):
    assert risks(texts, "zh") == pytest.approx(brute_force_risks(texts, "zh"), abs=FLOAT_TOLERANCE)


def spelled(text: str, sure: float = 5.0) -> torch.Tensor:
    """CTC logits that find `text` likely, a blank after every letter."""
    path = [index for letter in byte_targets(text) for index in (letter, 0)]
    return torch.nn.functional.one_hot(torch.tensor(path), CLASSES) * sure


def test_a_text_that_cannot_be_heard_from_start_to_end_is_not_chosen():
    said = " the cat sat on the mat"
    texts = ["the cat cat sat on the mat", "the cat sat on the mat", "the cat sat the mat", "the cat sat on on the mat"]
    heard = replace(pool(texts), bytes_TV=spelled(said))
    chosen = SpelledConsensus()([heard])[0]
    assert chosen.index == 1
    assert chosen.risks == risks(texts, "en")
    endless = replace(pool(["the cat " * 9, "a dog"]), bytes_TV=spelled(said))
    assert SpelledConsensus()([endless])[0].index == 1  # the other has more letters than there are frames
    with pytest.raises(OptionError, match="adapter"):
        SpelledConsensus()([pool(texts)])


def test_consensus_weighs_against_spelling():
    texts = ["the cat sat", "the cat sat", "the cat sat", "the bat sat"]
    for sure, index in ((0.2, 0), (20.0, 3)):
        heard = replace(pool(texts), bytes_TV=spelled(" the bat sat", sure))
        assert SpelledConsensus()([heard])[0].index == index


def test_consensus_wins():
    texts = ["the cat sat", "the cat sat on", "the cat sat down", "a dog", "the cat sat"]
    chosen = MinimumBayesRisk()([pool(texts)])[0]
    assert chosen.index == 0
    assert chosen.scores == tuple(-risk for risk in risks(texts, "en"))


def test_ties_go_to_the_higher_confidence():
    texts = ["one cat", "one hat"]
    assert MinimumBayesRisk()([pool(texts, confidences=[-0.5, -0.2])])[0].index == 1
    assert MinimumBayesRisk()([pool(texts, confidences=[-0.2, -0.5])])[0].index == 0
    assert MinimumBayesRisk()([pool(texts)])[0].index == 0


def test_case_and_punctuation_are_no_disagreement():
    assert risks(["It's fine.", "it is fine"], "en") == [0, 0]


def test_highest_confidence():
    chosen = HighestConfidence()([pool(["a", "b", "c"], confidences=[-0.3, -0.1, -0.2])])[0]
    assert chosen.index == 1
    assert chosen.scores == (-0.3, -0.1, -0.2)


def test_the_oracle_is_nearest_to_the_reference():
    chosen = Oracle()([pool(["a b c d", "a b c", "x"], reference="a b c e")])[0]
    assert chosen.index == 0 or chosen.scores[chosen.index] == max(chosen.scores)
    assert chosen.scores == (-0.25, -0.25, -1.0)
    with pytest.raises(OptionError, match="reference"):
        Oracle()([pool(["a"])])


def test_rerank_chooses_what_whisper_finds_likeliest():
    torch.manual_seed(0)
    decoder = WhisperDecoder(WhisperDecoderConfig(vocab_size=51_865, width=64, layers=2, heads=1, positions=448))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    texts = ["one two", "three", "four five six seven"]
    pools = [pool(texts, audio=torch.randn(t, 64)) for t in (30, 50)]
    together = WhisperRerank(decoder)(pools)
    for one, selection in zip(pools, together, strict=True):
        assert one.audio_TD is not None
        alone = log_likelihood(decoder, one.audio_TD[None], [[c.tokens for c in one.candidates]], "en")[0]
        assert selection.scores == pytest.approx(tuple(alone), abs=LIKELIHOOD_TOLERANCE)
        assert selection.index == max(range(3), key=lambda i: alone[i])
    with pytest.raises(OptionError, match="features"):
        WhisperRerank(decoder)([pool(texts)])
