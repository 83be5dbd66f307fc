"""A run with a time to keep: how many steps fit, estimated anew from what was measured so far."""

import time
from collections import deque

from whisfusion.train.config import Recipe
from whisfusion.train.state import Progress

_RECENT = 8
"""Readings that a speed is taken from."""


class Budget:
    """The time of a run, from its start on this machine and in earlier starts."""

    def __init__(self, recipe: Recipe, progress: Progress, began: float, *, evaluates: bool) -> None:
        """`began` is `time.perf_counter()` at the start of this run, or of its going on."""
        self._seconds = None if recipe.minutes is None else 60 * recipe.minutes
        self._log_every, self._eval_every = recipe.log_every, recipe.eval_every
        self._progress, self._evaluates = progress, evaluates
        # A resumed run has spent time before.
        self._began = began - progress.elapsed
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._first: int | None = None
        self._look_at = 0

    def due(self, step: int) -> bool:
        """Whether to look at the clock after this step: the first, then ever fewer of them, and many near the end."""
        return self._seconds is not None and step >= self._look_at

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    def steps(self, step: int, counted: int, seconds: float) -> int | None:
        """How many steps the whole run has, as of now; None where that is not for the clock to say.

        The last `counted` steps took `seconds`.
        """
        if self._seconds is None:
            return None
        if self._first is None:
            self._first = step - counted
        self._recent.append((counted, seconds / max(1, counted)))
        # Compiling makes readings slow, and a reading of few steps says little.
        longest = max(count for count, _ in self._recent)
        speed = min(speed for count, speed in self._recent if 2 * count >= longest)
        left = self._seconds - self.elapsed() - self._progress.evaluation_seconds - self._progress.saving_seconds
        evaluation = self._progress.evaluation_seconds if self._evaluates else 0.0
        total = fitting(step, left, speed, evaluation=evaluation, eval_every=self._eval_every)
        if left > 0 and step - self._first < self._log_every:
            # That is the speed of compiling: the next step may be faster, and a resumed run knows better.
            return max(step + 1, self._progress.expected_steps if self._first else total)
        return total

    def plan_look(self, step: int, steps: int) -> None:
        """Say when to look again in a run that is now expected to have `steps` steps.

        At the latest after half of what is left, and after as many steps as this process has made.
        """
        self._look_at = step + max(1, min(self._log_every, (steps - step) // 2, step - (self._first or 0)))


def fitting(step: int, left: float, speed: float, *, evaluation: float, eval_every: int) -> int:
    """The last step that can be reached from `step` in `left` seconds, at `speed` seconds a step.

    Every `eval_every` steps an evaluation takes `evaluation` seconds, but not after the last step.
    """
    while left > 0:
        reached = step + int(left / max(speed, 1e-9))
        following = (step // eval_every + 1) * eval_every
        if not evaluation or reached <= following:
            return reached
        left -= (following - step) * speed + evaluation
        step = following
    return step
