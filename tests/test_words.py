import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from whisfusion.ctc import BLANK, CLASSES, byte_targets
from whisfusion.tokenizer import get_tokenizer
from whisfusion.words import SECONDS, best_path, time_words


def logits_at(places: dict[int, int], frames: int) -> torch.Tensor:
    """CTC that hears a class in each of some frames, and nothing elsewhere."""
    return 9 * F.one_hot(torch.tensor([places.get(frame, BLANK) for frame in range(frames)]), CLASSES).float()


def heard(text: str, *, first: int, apart: int, frames: int) -> torch.Tensor:
    """A letter every so many frames, from a first one on."""
    return logits_at({first + apart * i: letter for i, letter in enumerate(byte_targets(text))}, frames)


@pytest.mark.parametrize("seed", range(6))
def test_the_path_is_the_likeliest_of_all(seed):
    rng = np.random.default_rng(seed)
    logp = np.log(rng.dirichlet(np.ones(5), size=6))
    target = [1, 1, 2] if seed % 2 else [3, 1, 2]

    def spelled(path: tuple[int, ...]) -> list[int]:
        return [index for index, _ in itertools.groupby(path) if index != BLANK]

    paths = [path for path in itertools.product(range(4), repeat=6) if spelled(path) == target]
    best = max(paths, key=lambda path: sum(logp[frame, index] for frame, index in enumerate(path)))
    runs, frame = [], 0
    for index, run in itertools.groupby(best):
        count = len(list(run))
        runs += [(frame, frame + count)] * (index != BLANK)
        frame += count
    assert best_path(logp, target) == runs


def test_a_text_longer_than_the_audio_has_no_path():
    assert best_path(np.zeros((3, 5)), [1, 2, 3, 4]) is None
    # Between two of the same there must be a blank.
    assert best_path(np.zeros((3, 5)), [1, 1, 1]) is None
    assert best_path(np.zeros((3, 5)), [1, 1]) == [(0, 1), (2, 3)]
    assert best_path(np.zeros((3, 5)), []) == []


def test_words_are_where_their_letters_are():
    tokens = get_tokenizer().encode("We met, at noon.")
    words = time_words(tokens, heard(" We met, at noon.", first=10, apart=4, frames=200), "en")
    assert [word.word for word in words] == [" We", " met,", " at", " noon."]
    for word, letters in zip(words, [(1, 2), (4, 7), (9, 10), (12, 16)], strict=True):
        first, last = ((10 + 4 * letter) * SECONDS for letter in letters)
        assert first - 0.07 < word.start <= first
        assert last <= word.end < last + 0.13
        assert word.probability > 0.9
    assert all(one.end <= other.start for one, other in itertools.pairwise(words))


def test_marks_go_with_the_word_before_and_nothing_is_lost():
    text = "Wait - what?! It's “fine”, no."
    tokens = get_tokenizer().encode(text)
    words = time_words(tokens, heard(f" {text}", first=3, apart=3, frames=200), "en")
    assert "".join(word.word for word in words).strip() == text
    assert [word.word for word in words] == [" Wait -", " what?!", " It's", " “fine”,", " no."]


def test_where_nothing_is_written_between_words_characters_are_timed():
    text = "我在公园，好。"
    tokens = get_tokenizer().encode(text)
    words = time_words(tokens, heard(f" {text}", first=3, apart=3, frames=200), "zh")
    assert [word.word.strip() for word in words] == ["我", "在", "公", "园，", "好。"]
    text = "我用iPhone 15拍，2024年。"
    words = time_words(get_tokenizer().encode(text), heard(f" {text}", first=3, apart=3, frames=300), "zh")
    assert [word.word.strip() for word in words] == ["我", "用", "iPhone", "15", "拍，", "2024", "年。"]


def test_parts_of_characters_are_left_out():
    first, _ = get_tokenizer().encode("滩")[-2:]
    tokens = [*get_tokenizer().encode("cat"), first]
    words = time_words(tokens, heard(" cat", first=3, apart=3, frames=200), "en")
    assert [word.word for word in words] == [" cat"]


def test_long_texts_have_times_too():
    text = " ".join(["all", "of", "it"] * 20)
    words = time_words(get_tokenizer().encode(text), heard(f" {text}", first=3, apart=3, frames=800), "en")
    assert [word.word.strip() for word in words] == text.split()
    assert all(abs(two.start - one.start - 0.06 * len(one.word)) < 0.03 for one, two in itertools.pairwise(words))


def test_no_text_has_no_words():
    assert time_words([], torch.zeros(40, CLASSES), "en") == ()


def test_a_text_without_a_path_is_spread_over_the_audio():
    one, two = time_words(get_tokenizer().encode("too long"), torch.zeros(4, CLASSES), "en")
    assert (one.word, two.word) == (" too", " long")
    assert 0 <= one.start <= one.end <= two.start <= two.end <= 4 * SECONDS
    assert one.probability == two.probability == 0
