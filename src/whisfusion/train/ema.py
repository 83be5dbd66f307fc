"""The running average of the weights: what is evaluated, exported and started from."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Ema:
    """Float32 averages of named parameters; of a sharded parameter each rank averages its own part."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._live = dict(parameters)
        self.averages = {name: value.detach().clone() for name, value in self._live.items()}
        self._pairs = (
            [_local(value) for value in self.averages.values()],
            [_local(value.detach()) for value in self._live.values()],
        )

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Keep `decay` of the averages and take the rest from the weights of now."""
        averages, live = self._pairs
        torch._foreach_lerp_(averages, live, 1 - decay)

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Take over averages of the same names and layout."""
        for name, value in self.averages.items():
            value.copy_(averages[name])

    def full(self) -> dict[str, Tensor]:
        """Whole averages on every rank; all ranks must call it together."""
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in self.averages.items()
        }


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
