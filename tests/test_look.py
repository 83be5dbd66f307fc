"""A second look: what is hidden from the decoder, and what it is asked."""

import torch

from whisfusion.look import CANVASES, Canvases, masked, predicted, read
from whisfusion.tokenizer import ENDOFTEXT, MASK, PROMPT_LENGTH, get_tokenizer

TEXTS = [(11, 12, 13), (), (21, 22, 23, 24)]


def canvases() -> Canvases:
    prompts_BP = torch.tensor([get_tokenizer().prompt("en")] * len(TEXTS))
    return Canvases.of(prompts_BP, TEXTS, positions=12)


def test_texts_stand_between_prompt_and_endoftext():
    shown = canvases()
    for row_L, count, text in zip(shown.written_BL.tolist(), shown.counts_B.tolist(), TEXTS, strict=True):
        assert row_L[:PROMPT_LENGTH] == list(get_tokenizer().prompt("en"))
        assert row_L[PROMPT_LENGTH : PROMPT_LENGTH + count] == [*text, ENDOFTEXT]
        assert set(row_L[PROMPT_LENGTH + count :]) <= {ENDOFTEXT}


def test_every_position_is_hidden_once_and_never_beside_another():
    shown = canvases()
    tokens_B2L, own_BL = masked(shown.written_BL, shown.counts_B)
    hidden_B2L = tokens_B2L == MASK
    assert (hidden_B2L[..., 1:] & hidden_B2L[..., :-1]).sum() == 0
    after_prompt_L = torch.arange(12) >= PROMPT_LENGTH
    assert torch.equal(hidden_B2L.sum(1), (own_BL & after_prompt_L).long())
    assert torch.equal(own_BL.sum(1), PROMPT_LENGTH + shown.counts_B)
    seen_B2L = shown.written_BL[:, None].expand_as(tokens_B2L)
    assert torch.equal(tokens_B2L[~hidden_B2L], seen_B2L[~hidden_B2L])
    # What is read of a position is read where it was hidden.
    assert torch.equal(predicted(hidden_B2L[..., None])[..., 0], own_BL & after_prompt_L)
    assert tokens_B2L.shape[1] == CANVASES


def test_what_is_read_does_not_depend_on_how_much_at_once():
    logits_RV = torch.randn(10, 40, generator=torch.Generator().manual_seed(0))
    columns_R = torch.arange(10)
    whole = read(lambda rows: logits_RV[rows], columns_R, 4, at_once=100)
    parts = read(lambda rows: logits_RV[rows], columns_R, 4, at_once=3)
    logprobs_RV = logits_RV.log_softmax(1)
    torch.testing.assert_close(whole, parts)
    torch.testing.assert_close(whole[1], logprobs_RV.topk(4).values)
    torch.testing.assert_close(whole[2], logprobs_RV[columns_R, columns_R])
