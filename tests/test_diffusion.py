import math

import pytest
import torch

from whisfusion.diffusion import MaskRatios, corrupt, diffusion_loss, loss_weights, position_losses, quantity_loss
from whisfusion.errors import OptionError
from whisfusion.tokenizer import ENDOFTEXT, MASK


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def canvas(rows=4, length=40, text=20):
    tokens = torch.arange(100, 100 + length).repeat(rows, 1)
    tokens[:, 4 + text :] = ENDOFTEXT
    position = torch.arange(length).repeat(rows, 1)
    return tokens, position >= 4, (position >= 4) & (position <= 4 + text)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 1.0])
def test_each_maskable_position_falls_with_probability_t(ratio):
    tokens, maskable, scored = canvas(rows=400)
    corrupted = corrupt(tokens, maskable, scored, torch.full((400,), ratio), generator=generator())
    masked = corrupted == MASK
    assert not masked[:, :4].any()
    assert torch.equal(corrupted[~masked], tokens[~masked])
    assert (masked & scored).any(1).all()
    padding = masked[:, 25:].float()
    assert abs(padding.mean().item() - ratio) <= 4 * math.sqrt(ratio * (1 - ratio) / padding.numel())


def test_where_nothing_fell_exactly_one_scored_position_is_masked():
    tokens, maskable, scored = canvas(rows=64)
    corrupted = corrupt(tokens, maskable, scored, torch.zeros(64), generator=generator())
    assert ((corrupted == MASK).sum(1) == 1).all()
    assert ((corrupted == MASK) & scored).any(1).all()
    assert len((corrupted == MASK).nonzero()[:, 1].unique()) > 8


def test_the_loss_is_the_mean_over_positions_then_over_utterances():
    tokens, maskable, scored = canvas(rows=3, text=10)
    corrupted = corrupt(tokens, maskable, scored, torch.tensor([0.1, 0.5, 1.0]), generator=generator(1))
    weights = loss_weights(corrupted, scored)
    logits = torch.randn(3, 40, 60_000, generator=generator(2))
    by_hand = 0.0
    for row in range(3):
        positions = [i for i in range(40) if corrupted[row, i] == MASK and scored[row, i]]
        losses = [-logits[row, i].log_softmax(0)[tokens[row, i]].item() for i in positions]
        by_hand += sum(losses) / len(losses)
    chosen = weights > 0
    loss = diffusion_loss(position_losses(logits[chosen], tokens[chosen]), weights[chosen])
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)
    assert torch.allclose(weights.sum(1), torch.ones(3))


def test_no_weight_outside_the_transcript():
    tokens, maskable, scored = canvas()
    corrupted = corrupt(tokens, maskable, scored, torch.ones(4), generator=generator())
    weights = loss_weights(corrupted, scored)
    assert (weights[:, :4] == 0).all()
    assert (weights[:, 25:] == 0).all()
    assert (weights[:, 4:25] > 0).all()


def test_mask_ratios_stay_in_their_range():
    ratios = MaskRatios(0.7, 1.0).draw(10_000, generator=generator())
    assert ratios.min() >= 0.7
    assert ratios.max() <= 1.0
    assert ratios.mean().item() == pytest.approx(0.85, abs=0.01)
    with pytest.raises(OptionError, match="low <= high"):
        MaskRatios(0.8, 0.2)


def test_quantity_loss_is_relative():
    assert quantity_loss(torch.tensor([12.0, 5.0]), torch.tensor([10, 10])).item() == pytest.approx(0.35)
