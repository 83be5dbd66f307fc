import sys

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisfusion.english_numbers import numbers_in_digits
from whisfusion.normalise import (
    CHARACTER_LANGUAGES,
    _levenshtein,
    basic_normalise,
    edit_distance,
    edit_rate,
    english_normalise,
    normalise,
    pairwise_edits,
    units,
)

# Rounding of one division: both sides divide the same two integers.
RATE_TOLERANCE = 1e-12

some_units = st.lists(st.sampled_from(["a", "b", "c", "dd", "é"]), max_size=12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Mr. Neil won't pay $2.5 million in grey", "mister neil will not pay $2500000 in gray"),
        ("I'm sure they've gone; he'd been there", "i am sure they have gone he had been there"),
        ("It's been fun, but he's done", "it has been fun but he is done"),
        ("Uh, the colour, hmm, is um... nice", "the color is nice"),
        ("[noise] hello (laughs) there <unk>", "hello there"),
        ("a naïve Straße in Łódź", "a naive strasse in lodz"),
        ("1,000,000 people", "1000000 people"),
        ("50 % of $20", "50 of $20"),
        ("don’t", "don t"),
        ("well… yes", "well . yes"),
        ("O'Hara", "0 hara"),
        ("", ""),
        ("?!", ""),
    ],
)
def test_english(text, expected):
    assert normalise(text, "en") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("twenty one", "21"),
        ("two hundred and five", "205"),
        ("three and four", "3 and 4"),
        ("nineteen ninety nine", "1999"),
        ("nineteen hundred and eighty four", "1984"),
        ("one oh one", "101"),
        ("double oh seven", "007"),
        ("triple nine one", "9991"),
        ("five hundred thousand", "500000"),
        ("two million three hundred thousand", "2300000"),
        ("two point five million", "2500000"),
        ("two and a half million", "2500000"),
        ("an hour and a half", "an hour and a half"),
        ("one point two three four five six seven eight million", "one.2345678 1000000"),
        ("twenty first", "21st"),
        ("twenties and hundreds", "20s and 100s"),
        ("sixteen sixes", "166s"),
        ("minus five", "-5"),
        ("plus a few", "plus a few"),
        ("two dollars and seven cents", "$2.07"),
        ("fifty cents", "¢50"),
        ("$0.50", "¢50"),
        ("ten percent or ten per cent", "10% or 10%"),
        ("ten per person", "10 per person"),
        ("1 of the 1s", "one of the ones"),
        ("version 1 point 2 point 3", "version one.2.3"),
        ("gate 12b on the 3 rd", "gate 12 b on the 3rd"),
    ],
)
def test_english_numbers(text, expected):
    assert numbers_in_digits(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the ninth", "the ninth"),
        ("and a half of it", "of it"),
        ("1.5", "one.5"),
        ("0 point 5", ".5"),
        ("5.00 and 007", "5 and 7"),
        ("minus five dollars", "$5"),
        ("minus and five", "-and 5"),
        ("two point million", "2000000"),
        ("$0 50", "¢50"),
    ],
)
def test_english_numbers_share_the_quirks_of_the_original(text, expected):
    assert numbers_in_digits(text) == expected


def test_absurdly_long_numbers_are_left_alone():
    digits = "9" * 5000
    assert numbers_in_digits(f"{digits} million") == f"{digits} 1000000"
    assert numbers_in_digits("nine " * 5000 + "million") == f"{digits} 1000000"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("¿Dónde está?", " dónde está "),
        ("L'été, c'est fini!", "l été c est fini "),
        ("STRAẞE 5 (Hof)", "straße 5 "),
        ("[音楽] ＡＢＣ、ｶﾞ。", " abc ガ "),
        ("twenty one colours", "twenty one colours"),
        ("50% von 3,5 €", "50 von 3 5 "),
    ],
)
def test_basic(text, expected):
    assert basic_normalise(text) == expected


@given(st.text())
def test_normalised_text_has_single_spaces_and_none_around(text):
    for language in ("en", "de"):
        normalised = normalise(text, language)
        assert normalised == " ".join(normalised.split())


def test_only_english_is_normalised_as_english():
    text = "Dr. Grey's colours"
    assert normalise(text, "en") == english_normalise(text) == "doctor gray is colors"
    assert normalise(text, "fr") == basic_normalise(text) == "dr grey s colours"


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("It's fine.", "en", ["it", "is", "fine"]),
        ("C'est ça !", "fr", ["c", "est", "ça"]),
        ("今天 天气，很好。", "zh", [*"今天天气很好"]),
        ("오늘 날씨", "ko", [*"오늘날씨"]),
        ("か\u3099", "ja", ["が"]),
        ("?!", "en", []),
        ("。", "ja", []),
    ],
)
def test_units(text, language, expected):
    assert units(text, language) == expected


def test_edit_rate_normalises_and_divides_by_the_reference():
    assert edit_rate("It's a colour!", "it is a color", "en") == 0
    assert edit_rate("a b", "a b c d", "de") == 0.5
    assert edit_rate("a b c d", "a b", "de") == 1.0
    assert edit_rate("今天 好", "今天天气好", "zh") == 0.4


def test_edit_rate_of_an_empty_reference_counts_the_insertions():
    assert edit_rate("two words", "", "de") == 2.0
    assert edit_rate("", "", "de") == 0.0


@given(hypothesis=some_units, reference=some_units.filter(bool))
def test_edit_rate_is_jiwers(hypothesis, reference):
    words = " ".join(hypothesis), " ".join(reference)
    expected = jiwer.wer(words[1], words[0])
    assert edit_rate(*words, "de") == pytest.approx(expected, abs=RATE_TOLERANCE)
    expected = jiwer.cer("".join(reference), "".join(hypothesis))
    for language in CHARACTER_LANGUAGES:
        assert edit_rate(*words, language) == pytest.approx(expected, abs=RATE_TOLERANCE)


@given(st.lists(some_units, min_size=2, max_size=6))
def test_edit_distances_without_rapidfuzz_are_the_same(sequences):
    expected = pairwise_edits(sequences)
    assert expected == [[edit_distance(one, other) for other in sequences] for one in sequences]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rapidfuzz.distance", None)
        _levenshtein.cache_clear()
        assert pairwise_edits(sequences) == expected
        assert edit_distance(sequences[0], sequences[1]) == expected[0][1]
    _levenshtein.cache_clear()
