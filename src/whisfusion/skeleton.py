"""Modules without weights, to be filled with those of a file."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def skeleton() -> Generator[None]:
    """Modules that are made within have shapes alone.

    Drawing first weights for them would not only be in vain: where there is no memory to write them to, torch loads
    its compiler for it, which takes longer than reading a model.
    """
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    """Leaves tensors as they are that would be filled with random numbers."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> Any:
        named = named or {}
        if getattr(function, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return arguments[0] if arguments else named["tensor"]
        return function(*arguments, **named)
