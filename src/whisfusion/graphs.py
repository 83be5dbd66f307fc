"""Work that a device does without the host in between, and the few copies to and from it.

On a GPU work is captured once as a CUDA graph and from then on is one launch. What goes to the device and what comes
back is packed: a copy costs the host as much for four bytes as for a megabyte.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From named tensors to named tensors, with shapes that depend on no value."""

MOST_GRAPHS = 256
"""Graphs kept. They share the memory that they work in, but each takes some of the GPU's for itself. A
model whose windows and canvases follow duration has some 80 shapes a batch size."""
_WARMUPS = 2
"""Runs before capture: kernels are compiled and libraries set themselves up in them."""


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Do the work again, on what the inputs hold now."""
        ...


@dataclass(frozen=True)
class Captured:
    """A graph, and the places on the device that it reads and writes."""

    graph: Replayable
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Graphs:
    """Work by key: captured when it is first met, replayed from then on; the `limit` used last are kept."""

    def __init__(self, device: torch.device, *, limit: int = MOST_GRAPHS) -> None:
        self._device, self._limit = device, limit
        # The one used last is the last.
        self._kept: dict[Hashable, Captured] = {}
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def __call__(self, key: Hashable, work: Work, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `work` makes of `inputs`, which may be on the host; overwritten by the next call with this key.

        Results of another graph are read where they are, without a copy.
        """
        if key in self._kept:
            captured = self._kept.pop(key)
        else:
            while len(self._kept) >= self._limit:
                self._forget(next(iter(self._kept)))
            captured = self._capture(work, {name: self._place(value) for name, value in inputs.items()})
        self._kept[key] = captured
        for name, place in captured.inputs.items():
            if place is not inputs[name]:
                place.copy_(inputs[name], non_blocking=True)
        captured.graph.replay()
        return captured.outputs

    def _place(self, value: Tensor) -> Tensor:
        """Where a graph will look for `value`."""
        if any(value is result for captured in self._kept.values() for result in captured.outputs.values()):
            return value
        return torch.empty_like(value, device=self._device).copy_(value, non_blocking=True)

    def _forget(self, key: Hashable) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # it may be running
        del self._kept[key]

    def _capture(self, work: Work, inputs: dict[str, Tensor]) -> Captured:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                work(inputs)
        torch.cuda.current_stream().wait_stream(side)
        # Graphs run one after another, so they can share the memory that they work in.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = work(inputs)
        return Captured(graph, inputs, outputs)


class Packing:
    """Where several tensors lie in one of bytes."""

    def __init__(self, parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        # Those of larger numbers first: so each begins at a multiple of its numbers' size.
        self._parts = dict(sorted(parts.items(), key=lambda part: -part[1][0].itemsize))
        self.size = sum(dtype.itemsize * prod(shape) for dtype, shape in self._parts.values())

    @classmethod
    def of(cls, values: Mapping[str, Tensor]) -> "Packing":
        """Room for `values`."""
        return cls({name: (value.dtype, tuple(value.shape)) for name, value in values.items()})

    def pack(self, values: Mapping[str, Tensor], octets: Tensor) -> Tensor:
        """`octets`, with `values` in it."""
        for name, place in self.unpack(octets).items():
            place.copy_(values[name])
        return octets

    def unpack(self, octets: Tensor) -> dict[str, Tensor]:
        """Views of what is packed in `octets`."""
        values, first = {}, 0
        for name, (dtype, shape) in self._parts.items():
            last = first + dtype.itemsize * prod(shape)
            values[name] = octets[first:last].view(dtype).view(shape)
            first = last
        return values


def host_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory on the host, not set to anything, that `device` can copy from and to on its own."""
    # torch keeps what was pinned before, and gives it out again when the device has done with it.
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, complete when the device has come to them; `values` may be overwritten then."""
    packing, device = Packing.of(values), next(iter(values.values())).device
    packed = packing.pack(values, torch.empty(packing.size, dtype=torch.uint8, device=device))
    host = host_tensor(packing.size, dtype=torch.uint8, device=device)
    return packing.unpack(host.copy_(packed, non_blocking=True))


class Clock:
    """Seconds between laps of one batch, on the GPU's own clock where there is one: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps = [("", self._now())]

    def _now(self) -> "torch.cuda.Event | float":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, stage: str) -> None:
        """What has passed since the last lap was `stage`."""
        self._laps.append((stage, self._now()))

    def wait(self, timings: dict[str, float]) -> None:
        """Wait for the last lap, and add all to `timings`."""
        last = self._laps[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        for (_, before), (stage, after) in zip(self._laps, self._laps[1:], strict=False):
            if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                seconds = before.elapsed_time(after) / 1000
            elif isinstance(before, float) and isinstance(after, float):
                seconds = after - before
            timings[stage] = timings.get(stage, 0.0) + seconds
