import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whisfusion import tokenizer as tokens
from whisfusion.errors import LanguageError, ModelError
from whisfusion.tokenizer import (
    ENDOFTEXT,
    LANGUAGES,
    MASK,
    PAPER_LANGUAGES,
    PROMPT_LENGTH,
    SAMPLEABLE,
    VOCAB_SIZE,
    canonical_language,
    embedding_rows,
    get_tokenizer,
    id_from_whisper,
    whisper_id,
)

BEFORE_LARGE_V3 = 51_865
LARGE_V3 = 51_866
CANTONESE = 50_358


def test_ids_are_those_of_large_v3_and_the_mask():
    tokenizer = get_tokenizer()
    assert tokenizer.text_ids == range(50_257)
    assert (tokenizer.endoftext, tokenizer.startoftranscript) == (50_257, 50_258)
    assert (tokenizer.language_id("en"), tokenizer.language_id("yue")) == (50_259, CANTONESE)
    assert (tokenizer.translate, tokenizer.transcribe) == (50_359, 50_360)
    assert (tokenizer.startoflm, tokenizer.startofprev) == (50_361, 50_362)
    assert (tokenizer.nospeech, tokenizer.notimestamps) == (50_363, 50_364)
    assert (tokenizer.timestamp_begin, tokenizer.mask, tokenizer.vocab_size) == (50_365, 51_866, 51_867)
    assert tokenizer.mask - tokenizer.timestamp_begin == 1501  # 0.00 to 30.00 s in steps of 0.02 s


def test_only_text_and_endoftext_may_be_sampled():
    assert [i for i in range(SAMPLEABLE) if i not in get_tokenizer().text_ids] == [ENDOFTEXT]


def test_the_tokenizer_is_built_once():
    assert get_tokenizer() is get_tokenizer()


def test_the_last_text_token_is_empty_and_keeps_its_id():
    ranks = tokens._read_ranks()
    assert ranks[b""] == 50_256
    assert sorted(ranks.values()) == list(range(50_257))


def test_building_needs_neither_network_nor_cache(monkeypatch, tmp_path):
    def refuse(*_args, **_kwargs):
        raise AssertionError("the tokenizer opened a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert tokens.Tokenizer().encode("hello") == [7751]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", " ", "\t\n", "\u3000"])
def test_blank_text_has_no_tokens(text):
    assert get_tokenizer().encode(text) == []


def test_text_is_encoded_with_one_leading_space():
    tokenizer = get_tokenizer()
    assert tokenizer.encode("hello") == tokenizer.encode("  hello\n") == [7751]


def test_text_that_spells_a_special_token_stays_text():
    tokenizer = get_tokenizer()
    for text in ("<|endoftext|>", "<|en|>", "<|mask|>", "<|0.00|>"):
        ids = tokenizer.encode(text)
        assert max(ids) < ENDOFTEXT
        assert tokenizer.decode(ids) == text


@given(st.text())
def test_text_survives_the_way_there_and_back(text):
    ids = get_tokenizer().encode(text)
    assert all(0 <= i < ENDOFTEXT for i in ids)
    assert get_tokenizer().decode(ids) == text.strip()


def test_decode_stops_at_endoftext_and_drops_specials():
    tokenizer = get_tokenizer()
    ids = [*tokenizer.prompt("en"), *tokenizer.encode("one"), MASK, *tokenizer.encode("two")]
    ids += [ENDOFTEXT, *tokenizer.encode("three")]
    assert tokenizer.decode(ids) == "one two"


@pytest.mark.parametrize("as_sequence", [tuple, iter, np.array, torch.tensor])
def test_decode_takes_any_sequence_of_ids(as_sequence):
    assert get_tokenizer().decode(as_sequence([7751, 220, 50_256])) == "hello"


def test_half_a_character_decodes_to_the_replacement_character():
    tokenizer = get_tokenizer()
    *_, first, second = tokenizer.encode("彼")
    assert tokenizer.decode([first, second]) == "彼"
    assert tokenizer.decode([first]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("language", ["ja", "Japanese", "JA", "ja-JP", "ja_JP", " japanese "])
def test_prompt(language):
    prompt = get_tokenizer().prompt(language)
    assert prompt == [50_258, 50_266, 50_360, 50_364]
    assert len(prompt) == PROMPT_LENGTH


def test_every_language_has_a_token_and_back():
    tokenizer = get_tokenizer()
    assert len(LANGUAGES) == 100
    assert set(PAPER_LANGUAGES) <= set(LANGUAGES)
    for code, name in LANGUAGES.items():
        assert tokenizer.language_of(tokenizer.language_id(code)) == code
        assert canonical_language(name.title()) == code


@pytest.mark.parametrize("language_id", [50_258, 50_359, 0])
def test_other_tokens_are_no_language(language_id):
    with pytest.raises(LanguageError, match="50259 to 50358"):
        get_tokenizer().language_of(language_id)


@pytest.mark.parametrize(
    ("unknown", "hint"), [("englsh", "'english'"), ("germn", "'german'"), ("xx", "such as en"), ("", "such as en")]
)
def test_an_unknown_language_is_told_what_to_give(unknown, hint):
    with pytest.raises(LanguageError, match=hint) as caught:
        get_tokenizer().language_id(unknown)
    assert repr(unknown) in str(caught.value)


@pytest.mark.parametrize("vocab_size", [BEFORE_LARGE_V3, LARGE_V3])
def test_embedding_rows_use_every_row_of_whisper_once(vocab_size):
    rows = embedding_rows(vocab_size)
    assert len(rows) == VOCAB_SIZE
    assert [row for row in rows if row is not None] == list(range(vocab_size))
    for our_id, row in enumerate(rows):
        if row is not None:
            assert whisper_id(our_id, vocab_size) == row
            assert id_from_whisper(row, vocab_size) == our_id


def test_what_whisper_has_no_row_for():
    assert embedding_rows(LARGE_V3)[CANTONESE] == CANTONESE
    assert [i for i, row in enumerate(embedding_rows(BEFORE_LARGE_V3)) if row is None] == [CANTONESE, MASK]
    with pytest.raises(LanguageError, match="Cantonese"):
        whisper_id(CANTONESE, BEFORE_LARGE_V3)
    for no_id in (MASK, -1, VOCAB_SIZE):
        with pytest.raises(ValueError, match=f"our id {no_id}"):
            whisper_id(no_id, LARGE_V3)
    for vocab_size in (BEFORE_LARGE_V3, LARGE_V3):
        for no_id in (-1, vocab_size):
            with pytest.raises(ValueError, match="outside a vocabulary"):
                id_from_whisper(no_id, vocab_size)


@pytest.mark.parametrize("vocab_size", [51_864, 51_867, 0])
def test_another_vocabulary_is_refused(vocab_size):
    for call in (embedding_rows, lambda size: whisper_id(0, size), lambda size: id_from_whisper(0, size)):
        with pytest.raises(ModelError, match=f"{vocab_size} tokens"):
            call(vocab_size)
