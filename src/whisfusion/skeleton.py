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
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
