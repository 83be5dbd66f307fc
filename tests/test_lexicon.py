import numpy as np
import pytest
import torch

from whisfusion.errors import ModelError
from whisfusion.lexicon import Lexicon, word_list
from whisfusion.normalise import edit_distance

LEXICON = Lexicon({"en": ["socket", "pocket", "rocket", "forsake", "for", "don't"], "de": ["größer"]})


def test_words_are_those_that_occur_often_enough_in_lower_case():
    texts = ["The cat's hat, the HAT!", "a 2nd hat; don’t", "a cat"]
    assert sorted(word_list(texts, "en", least=2)) == ["hat", "the"]
    assert "cat's" in word_list(texts, "en")
    assert "don’t" in word_list(texts, "en")
    assert word_list(["今天 今天"], "zh") == []


def test_similar_words_are_near_in_spelling_and_length():
    assert LEXICON.similar("en", "socket")[0] == "socket"
    assert set(LEXICON.similar("en", "sockit")) == {"socket", "pocket", "rocket"}
    assert LEXICON.similar("en", "forsak") == ("forsake",)
    assert LEXICON.similar("en", "zzzzzz") == ()
    assert LEXICON.similar("de", "grösser") == ("größer",)
    assert LEXICON.similar("fr", "socket") == ()


def test_a_lexicon_survives_packing():
    again = Lexicon.unpack(LEXICON.pack())
    assert again.languages == ("en", "de")
    assert all(sorted(again.words(code)) == sorted(LEXICON.words(code)) for code in again.languages)
    assert again.words("fr") == []
    with pytest.raises(ModelError, match="lexicon"):
        Lexicon.unpack({"en": torch.zeros(4, dtype=torch.uint8)})


def test_the_quick_look_at_letters_misses_no_word():
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdeéфж"), size)) for size in random.integers(2, 9, 400)]
    lexicon = Lexicon({"en": words})
    for heard in words[::20]:
        most = max(1, len(heard) // 3)
        near = {
            word
            for word in words
            if abs(len(word) - len(heard)) <= 2 and edit_distance(list(heard), list(word)) <= most
        }
        found = lexicon.similar("en", heard)
        assert set(found) <= near
        assert len(found) == min(6, len(near))
        assert found[0] == heard
