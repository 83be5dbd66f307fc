import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.ctc import BLANK, CLASSES, byte_targets, log_likelihoods
from whisfusion.lexicon import WordList
from whisfusion.pdd import Candidate, Thoughts
from whisfusion.repair import repair
from whisfusion.spelling import Edit, Text
from whisfusion.tokenizer import ENDOFTEXT, get_tokenizer
from whisfusion.trigrams import Trigrams

TOKENS = get_tokenizer().encode("the cat sat on the mat")
THE, CAT, SAT, ON, _, MAT = TOKENS
DOG, _ = get_tokenizer().encode("dog s")


def logits_of(text: str, *, sure: float = 6.0) -> Tensor:
    """CTC that hears a text, each of its letters for two frames and then nothing for one."""
    path = [index for letter in byte_targets(text) for index in (letter, letter, BLANK)]
    return F.one_hot(torch.tensor([BLANK, *path, BLANK]), CLASSES).float() * sure


def candidate(*tokens: int, logprob: float = -0.7) -> Candidate:
    return Candidate(tokens, (logprob,) * (len(tokens) + 1))


def thoughts(*places: tuple[int, ...], places_in_all: int = 12) -> Thoughts:
    """What the decoder had in mind for the first places, each a nat less likely than the one before."""
    tokens_LM = torch.full((places_in_all, 3), ENDOFTEXT)
    logprobs_LM = torch.full((places_in_all, 3), -torch.inf)
    for row, place in enumerate(places):
        tokens_LM[row, : len(place)] = torch.tensor(place)
        logprobs_LM[row, : len(place)] = -0.7 - torch.arange(len(place))
    return Thoughts(tokens_LM, logprobs_LM)


def mended(chosen: Candidate, thought: Thoughts, heard: str) -> str:
    return get_tokenizer().decode(repair(chosen, [chosen], thought, logits_of(heard)))


@pytest.mark.parametrize("seed", range(4))
def test_gains_are_what_ctc_says_of_the_whole_text(seed):
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 2 * torch.randn(20, CLASSES, generator=generator)
    tokens = [ON, CAT, ON]
    words = [(), (DOG,), (ON,), (ON, CAT)]
    spans = [(i, j) for i, j in itertools.product(range(4), repeat=2) if i <= j]
    edits = [Edit(first, end, new, (), 0.0) for (first, end), new in itertools.product(spans, words)]
    text = Text.of(logits_TV.double().log_softmax(-1), tokens)
    assert text is not None
    spelled = get_tokenizer().token_bytes()

    def target(text: list[int]) -> list[int]:
        return [1 + byte for token in text for byte in spelled[token]]

    texts = [tokens, *([*tokens[: e.first], *e.tokens, *tokens[e.end :]] for e in edits)]
    own, *others = log_likelihoods(logits_TV, [target(text) for text in texts])
    assert text.gains(edits) == pytest.approx([other - own for other in others], abs=2e-3)


def test_a_word_that_is_there_twice_goes():
    assert (
        mended(candidate(THE, CAT, CAT, SAT), thoughts((THE,), (CAT,), (CAT, SAT), (SAT,)), " the cat sat")
        == "the cat sat"
    )


def test_a_word_that_is_missing_comes_from_what_the_decoder_had_in_mind():
    assert mended(candidate(THE, SAT), thoughts((THE,), (SAT, CAT)), " the cat sat") == "the cat sat"
    assert mended(candidate(THE, CAT), thoughts((THE,), (CAT,), (SAT,)), " the cat sat") == "the cat sat"


def test_a_word_gives_way_to_one_that_ctc_hears_and_the_decoder_thought_of():
    chosen = candidate(THE, DOG, SAT)
    assert mended(chosen, thoughts((THE,), (DOG, CAT), (SAT,)), " the cat sat") == "the cat sat"
    # Nobody thought of it: what CTC spells by ear is not written.
    assert "cat" not in mended(chosen, thoughts((THE,), (DOG,), (SAT,)), " the cat sat")


def test_one_word_may_stand_for_two():
    assert (
        mended(candidate(THE, ON, DOG, SAT), thoughts((THE,), (ON, CAT), (DOG,), (SAT,)), " the cat sat")
        == "the cat sat"
    )


def test_a_text_that_is_right_stays():
    chosen = candidate(*TOKENS)
    thought = thoughts(*((token, DOG, CAT) for token in TOKENS))
    assert repair(chosen, [chosen], thought, logits_of(" the cat sat on the mat")) == chosen.tokens


def test_what_the_decoder_is_sure_of_stays_though_ctc_hears_otherwise():
    chosen = candidate(THE, DOG, SAT, logprob=-1e-4)
    unlikely = Thoughts(torch.tensor([[THE, CAT], [DOG, CAT], [SAT, CAT]]), torch.tensor([[0.0, -9.0]] * 3))
    assert repair(chosen, [chosen], unlikely, logits_of(" the cat sat", sure=1.0)) == chosen.tokens


def test_other_candidates_words_are_thoughts_too():
    chosen, other = candidate(THE, DOG, SAT), candidate(THE, CAT, SAT)
    tokens = repair(chosen, [chosen, other], thoughts((THE,), (DOG,), (SAT,)), logits_of(" the cat sat"))
    assert tokens == other.tokens


def test_nothing_and_what_ctc_has_no_room_for_stay():
    assert repair(candidate(), [candidate()], thoughts((THE,)), logits_of(" the")) == ()
    chosen = candidate(*TOKENS)
    assert repair(chosen, [chosen], thoughts((DOG,)), torch.zeros(5, CLASSES)) == chosen.tokens


def test_words_that_nobody_thought_of_come_from_the_lexicon():
    said = "the cat will forsake him"
    assert len(get_tokenizer().encode("forsake")) > 1
    chosen = candidate(*get_tokenizer().encode("the cat will force him"), logprob=-2.0)
    thought = thoughts(*((token,) for token in chosen.tokens))
    heard = logits_of(" the cat will forsake him")
    words = WordList(["the", "will", "him", "forsake", "forsaken", "force", "cat", "bat"])
    tokens = repair(chosen, [chosen], thought, heard, words=words)
    assert get_tokenizer().decode(tokens) == said
    assert repair(chosen, [chosen], thought, heard, words=WordList([])) == chosen.tokens
    # A word that the decoder was sure of is not looked up.
    sure = candidate(*chosen.tokens, logprob=-0.1)
    assert repair(sure, [sure], thoughts(), heard, words=words) == sure.tokens


UNCLEAR = (logits_of(" the cat sat") + logits_of(" the dog sat")) / 2


def written_of_two(**known) -> str:
    chosen, thought = candidate(THE, DOG, SAT, logprob=-2.0), thoughts((THE,), (DOG, CAT), (SAT,))
    return get_tokenizer().decode(repair(chosen, [chosen], thought, UNCLEAR, **known))


def test_of_two_words_that_sound_alike_the_usual_one_is_written():
    assert written_of_two(trigrams=Trigrams.count([[THE, DOG, SAT]] * 9)) == "the dog sat"
    assert written_of_two(trigrams=Trigrams.count([[THE, CAT, SAT]] * 9)) == "the cat sat"


def test_of_two_that_sound_alike_the_one_that_is_a_word_is_written():
    assert written_of_two(words=WordList(["the", "dog", "sat"])) == "the dog sat"
    assert written_of_two(words=WordList(["the", "cat", "sat"])) == "the cat sat"


def test_a_word_keeps_its_capital_and_the_marks_after_it():
    chosen = candidate(*get_tokenizer().encode("Pocket, she said."), logprob=-2.0)
    thought = thoughts(*((token,) for token in chosen.tokens))
    tokens = repair(chosen, [chosen], thought, logits_of(" Socket, she said."), words=WordList(["socket"]))
    assert get_tokenizer().decode(tokens) == "Socket, she said."


@pytest.mark.parametrize("written", [("滩", "催"), ("催", "滩"), ("滩",)])
def test_parts_of_a_character_become_a_whole_one(written):
    """Of a character in two tokens one is wrong, or missing, and another one was less likely by itself."""
    (first, second), others = (get_tokenizer().encode(character)[-2:] for character in ("滩", "催"))
    parts = [(first, second)[i] if character == "滩" else others[i] for i, character in enumerate(written)]
    assert "\ufffd" in get_tokenizer().decode(parts)
    in_mind = thoughts((CAT,), (parts[0], first), (*parts[1:], second), (CAT,))
    chosen = candidate(CAT, *parts, CAT)
    # It was heard, but not so well that CTC would have it against the decoder.
    heard = logits_of(" cat滩 cat", sure=1.0)
    assert get_tokenizer().decode(repair(chosen, [chosen], in_mind, heard)) == "cat滩 cat"
