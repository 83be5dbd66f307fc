"""What changes over a run: learning rate, mask ratios, attention to what comes later, the average's memory."""

import math

from whisfusion.diffusion import MaskRatios
from whisfusion.train.config import Recipe


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: a linear rise to the peak, then a cosine to the floor."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    height = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return recipe.learning_rate * (recipe.floor + (1 - recipe.floor) * height)


def mask_ratios(recipe: Recipe, step: int, steps: int) -> MaskRatios:
    """The range that mask ratios are drawn from at step `step` (from 0) of `steps`."""
    _, low, high = max(stage for stage in recipe.masks if stage[0] <= step / steps)
    return MaskRatios(low, high)


def ema_decay(recipe: Recipe, step: int) -> float:
    """What step `step` (from 0) keeps of the weight average."""
    if not recipe.ema_ramp:
        return recipe.ema_decay
    return min(recipe.ema_decay, (step + 1) / (step + 1 + recipe.ema_ramp))


def ahead(recipe: Recipe, step: int, steps: int) -> float:
    """What is added to attention scores of later positions at step `step` (from 0) of `steps`."""
    if not recipe.ahead_share:
        return 0.0
    return recipe.ahead * max(0.0, 1 - step / (recipe.ahead_share * steps))
