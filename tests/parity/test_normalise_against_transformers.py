"""Both normalisers against transformers' classes. Tolerance: none, every character must agree."""

import json
import os
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from whisfusion import english_numbers, normalise
from whisfusion.normalise import basic_normalise, english_normalise
from whisfusion.tokenizer import PAPER_LANGUAGES

SENTENCES = json.loads((Path(__file__).parents[1] / "data" / "sentences.json").read_text(encoding="utf-8"))
SPELLING = json.loads(resources.files("whisfusion").joinpath("assets/english_spelling.json").read_text("utf-8"))

original_english = EnglishTextNormalizer(SPELLING)
original_basic = BasicTextNormalizer(remove_diacritics=False, split_letters=False)

number_words = sorted(english_numbers._NUMBER_WORDS)
# fmt: off
numerals = [
    "0", "1", "2", "5", "10", "20", "21", "100", "0.5", "1.5", "2.50", "5.00", "007", "1,000", "1,2,3", "12,345.67",
    "1st", "3 rd", "4 th", "1s", "1960s", "a1b2", "1.2.3", "10.", "½", "²", "３", "٣", "٣.٥",
    "$5", "$0", "$0.50", "€3", "£1.20", "¢50", "5%", "%", "$",
]
oddities = [
    "a", "half", "and a half", "hmm", "uh", "um", "colour", "ninth", "nineth", "x", "'", "''", "’", "(", ")", "(x)",
    "[a]", "<b>", "<c]", ".", "..", "...", "…", "-", "—", "naïve", "e\u0301", "Œuvre", "ß", "ﬁ", "ℌ", "ᴭ", "İ", "dr.",
    "\t", "\n", "\u3000", "\u200b",
]
# fmt: on
endings = ["n't", *normalise._WORD_ENDS, *normalise._PERFECT_TENSES]
contracted = [*normalise._WHOLE_WORDS, *("he" + ending for ending in endings)]
separators = [" "] * 6 + ["", "  ", "-", ",", "'", ".", "/"]

spoken_english = st.lists(
    st.tuples(
        st.one_of(*map(st.sampled_from, (number_words, numerals, contracted, oddities))), st.sampled_from(separators)
    ),
    max_size=10,
).map(lambda pairs: "".join(piece + separator for piece, separator in pairs))


def assert_same(text: str) -> None:
    assert english_normalise(text) == original_english(text)
    assert basic_normalise(text) == original_basic(text)


def test_there_are_sentences_enough():
    assert set(SENTENCES) == set(PAPER_LANGUAGES)
    assert min(map(len, SENTENCES.values())) >= 50
    assert len(SENTENCES["en"]) >= 150
    assert sum(map(len, SENTENCES.values())) >= 500


@pytest.mark.parametrize("language", SENTENCES)
def test_sentences(language):
    for text in SENTENCES[language]:
        assert_same(text)
        assert_same(text.upper())


def test_every_number_word_and_contraction_is_the_originals():
    assert original_english.standardize_numbers.words == english_numbers._NUMBER_WORDS
    for text in [*number_words, *contracted, *SPELLING]:
        assert_same(text)
        assert_same(f"Two {text} three")


@settings(derandomize=True, max_examples=1500, deadline=None)
@given(spoken_english)
@example("he'd been't")
@example("21'n'tn't")
@example("i'ma'am")
def test_english_of_every_kind(text):
    assert_same(text)


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(st.text())
def test_any_text(text):
    assert_same(text)


def test_real_transcripts():
    folder = os.environ.get("WHISFUSION_SPEECH")
    if not folder:
        pytest.skip("WHISFUSION_SPEECH is not set: no real transcripts")
    manifests = sorted(Path(folder).glob("*/*.jsonl"))
    assert manifests, f"no manifests in {folder}"
    for manifest in manifests:
        for line in manifest.read_text(encoding="utf-8").splitlines():
            assert_same(json.loads(line)["text"])
