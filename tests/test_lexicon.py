import numpy as np
import pytest
import torch

from whisfusion.errors import ModelError
from whisfusion.lexicon import Lexicon, WordList, word_list
from whisfusion.normalise import edit_distance

LEXICON = Lexicon.of({"en": ["socket", "pocket", "rocket", "forsake", "for", "don't"], "de": ["größer"]})


def test_words_are_those_that_occur_often_enough_in_lower_case():
    texts = ["The cat's hat, the HAT!", "a 2nd hat; don’t", "a cat"]
    assert sorted(word_list(texts, "en", least=2)) == ["hat", "the"]
    assert "cat's" in word_list(texts, "en")
    assert "don’t" in word_list(texts, "en")
    assert word_list(["今天 今天"], "zh") == []


def test_similar_words_are_near_in_spelling_and_length():
    assert LEXICON["en"].similar("socket")[0] == "socket"
    assert set(LEXICON["en"].similar("sockit")) == {"socket", "pocket", "rocket"}
    assert LEXICON["en"].similar("forsak") == ("forsake",)
    assert LEXICON["en"].similar("zzzzzz") == ()
    assert LEXICON["de"].similar("grösser") == ("größer",)


def test_words_that_are_none_are_counted():
    unknown = LEXICON["en"].unknown
    assert unknown(" Don't socket a pockety, rocket... gosh") == 2
    assert unknown("") == unknown(" 2, x!") == 0


def test_a_lexicon_survives_packing():
    again = Lexicon(LEXICON.pack())
    assert {code: {*words} for code, words in again.items()} == {code: {*words} for code, words in LEXICON.items()}
    with pytest.raises(ModelError, match="lexicon"):
        Lexicon({"en": torch.zeros(4, dtype=torch.uint8)})["en"]


def test_the_quick_look_at_letters_misses_no_word():
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdeéфж"), size)) for size in random.integers(2, 9, 400)]
    spelled = WordList(words)
    for heard in words[::20]:
        most = max(1, len(heard) // 3)
        near = {
            word
            for word in words
            if abs(len(word) - len(heard)) <= 2 and edit_distance(list(heard), list(word)) <= most
        }
        found = spelled.similar(heard)
        assert set(found) <= near
        assert len(found) == min(6, len(near))
        assert found[0] == heard
