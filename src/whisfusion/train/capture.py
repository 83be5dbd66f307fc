"""The device work of a training step as CUDA graphs: one launch instead of thousands, for batches of few shapes."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Work = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
"""Computes from named tensors, adds to the gradients of some parameters, and returns tensors."""

_WARMUPS = 2
"""Runs before capture: libraries set themselves up and blocks compile in them."""


class Captured:
    """`work` with the same results, replayed from a graph for every set of input shapes that it has met before.

    Gradients live in fixed buffers that replays add to: they must be zeroed, never set to None.
    """

    def __init__(self, work: Work, parameters: Sequence[Tensor]) -> None:
        self._work = work
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Sequence[Tensor]]] = {}
        # Graphs run one after another, so they can share the memory that they work in.
        self._pool = torch.cuda.graph_pool_handle()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The results of `work`; they are overwritten by the next call."""
        key = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs)
        graph, static, outputs = self._graphs[key]
        torch._foreach_copy_(list(static.values()), [inputs[name] for name in static])
        graph.replay()
        return outputs

    def _capture(
        self, inputs: Mapping[str, Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Sequence[Tensor]]:
        static = {name: value.clone() for name, value in inputs.items()}
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self._work(static)
        torch.cuda.current_stream().wait_stream(side)
        torch._foreach_copy_(gradients, before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._work(static)
        return graph, static, outputs
