"""The mean of two runs of one model: each has learned by heart other things, and the mean errs less than either."""

from collections.abc import Mapping

from torch import Tensor

from whisfusion.errors import OptionError


def averaged(state: Mapping[str, Tensor], other: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """`state` with a share of `other` in every weight; a part that `other` has not stays as it is.

    Raises OptionError for a share outside 0 to 1, or where a weight has another shape: then it is another model.
    """
    problems = [] if 0 <= share <= 1 else [f"the share of the other model must be between 0 and 1, not {share}"]
    common = [name for name in state if name in other]
    if not common:
        problems.append("the other model has no weight in common with this one")
    problems += [
        f"{name} has shape {tuple(other[name].shape)} in the other model, not {tuple(state[name].shape)}"
        for name in common
        if other[name].shape != state[name].shape
    ]
    OptionError.collect(problems)
    return {name: value.lerp(other[name], share) if name in other else value for name, value in state.items()}
