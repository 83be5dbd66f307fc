"""Attention of the fast engine: torch's own, or on a GPU the kernel that is fastest for a shape.

Which one that is depends on how many tiles a shape has for so many processors, so it is found out by trying, when a
shape is first met and before the work around it is captured. All give the same results but for rounding.

Letters: G sequences, Q queries and T keys of each, H heads, C width of a head, R = G * Q rows, D = H * C.
"""

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.kernels import has_triton

_log = logging.getLogger(__name__)

_RUNS, _MILLISECONDS = 20, 1.0
"""A kernel runs so often in a row, as one graph, for alone it would be over before it is timed; or for so long."""
_TIMES = 3
"""How often it is timed; the least counts."""
_CLEARLY = 0.98
"""The share of torch's time that another kernel must stay below to be taken instead."""
_TOLERANCE = 0.02
"""How far from torch's a kernel's results may be, next to their size: in half precision both are rounded."""


class Attend(Protocol):
    """Attention by some kernel."""

    def __call__(
        self, q_GQHC: Tensor, k_GTHC: Tensor, v_GTHC: Tensor, bias_GT: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """Rows (R, D), those of one sequence after another's; a bias is added to the scores."""
        ...


class Tiles(NamedTuple):
    """How attention is cut up."""

    rows: int
    """Queries of a tile."""
    columns: int
    """Keys of a tile."""
    warps: int
    stages: int
    """Tiles of keys that are on their way or in use."""
    parts: int = 1
    """Programs that share the keys of a query."""


TILES = (Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 3))
_TILES_EACH = 4
"""Keys are divided until every processor has so many tiles of queries."""


def plain(
    q_GQHC: Tensor, k_GTHC: Tensor, v_GTHC: Tensor, bias_GT: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """torch's own: see `Attend`."""
    q, k, v = (x.transpose(1, 2) for x in (q_GQHC, k_GTHC, v_GTHC))
    bias_G11T = None if bias_GT is None else bias_GT[:, None, None]
    y_GHQC = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_G11T, is_causal=causal)
    return y_GHQC.transpose(1, 2).flatten(2).flatten(0, 1)


def candidates(queries: int, keys: int, *, heads: int, processors: int) -> Iterator[Tiles]:
    """What is worth trying for so many heads of all sequences together."""
    for tiles in TILES:
        if tiles.rows > 64 and queries <= 64:
            continue
        yield tiles
        count, parts = heads * -(-queries // tiles.rows), 2
        while tiles.rows == 64 and count * parts <= 2 * _TILES_EACH * processors and keys >= 2 * parts * tiles.columns:
            yield tiles._replace(parts=parts)
            parts *= 2


Clock = Callable[[Callable[[], Tensor]], Callable[[], float]]
"""Gets ready to run something, and returns what runs it and tells how long it took."""


class Fastest:
    """Attention by the kernel that was fastest when a shape was first met."""

    def __init__(self, clock: Clock | None = None) -> None:
        """`clock`: what tells kernels apart; by default the GPU's own."""
        self.chosen: dict[tuple[Any, ...], Tiles | None] = {}
        """By shape; None is torch's own."""
        self._clock = clock

    def __call__(
        self, q_GQHC: Tensor, k_GTHC: Tensor, v_GTHC: Tensor, bias_GT: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """See `Attend`. In float32, and where there is no GPU, always torch's own."""
        own = _own(q_GQHC, k_GTHC, v_GTHC) if self._clock or q_GQHC.is_cuda else None
        if own is None:
            return plain(q_GQHC, k_GTHC, v_GTHC, bias_GT, causal=causal)

        def run(tiles: Tiles | None) -> Tensor:
            if tiles is None:
                return plain(q_GQHC, k_GTHC, v_GTHC, bias_GT, causal=causal)
            return own.attention(q_GQHC, k_GTHC, v_GTHC, bias_GT, causal=causal, tiles=tiles)

        sequences, queries, heads, width = q_GQHC.shape
        keys = k_GTHC.shape[1]
        # Shapes that fill as many tiles are one.
        shape = sequences, -(-queries // 64), -(-keys // 64), heads, width, bias_GT is not None, causal
        key = (*shape, q_GQHC.dtype, q_GQHC.device)
        if key not in self.chosen:
            if q_GQHC.is_cuda and torch.cuda.is_current_stream_capturing():
                return run(None)
            every = candidates(queries, keys, heads=sequences * heads, processors=_processors(q_GQHC.device))
            self.chosen[key] = self._fastest(run, every)
            _log.debug("attention of %s x %s queries on %s keys: %s", sequences, queries, keys, self.chosen[key])
        return run(self.chosen[key])

    def _fastest(self, run: Callable[[Tiles | None], Tensor], every: Iterator[Tiles]) -> Tiles | None:
        clock = self._clock or _graph_clock
        expected = run(None)
        clocks = {None: clock(lambda: run(None))}
        for tiles in every:
            try:
                if _differs(run(tiles), expected):
                    _log.warning("attention by %s is wrong here, and not used", tiles)
                    continue
                clocks[tiles] = clock(lambda tiles=tiles: run(tiles))
            except Exception as error:  # what a compiler or a driver may raise has no common name
                _log.debug("attention by %s does not work here: %s", tiles, error)
        least = dict.fromkeys(clocks, inf)
        for _ in range(_TIMES):
            least = {tiles: min(least[tiles], run_once()) for tiles, run_once in clocks.items()}
        best = min(least, key=least.__getitem__)
        return best if least[best] < _CLEARLY * least[None] else None


fastest = Fastest()
"""What all engines share, so that each shape is tried once."""


def _own(*tensors: Tensor) -> Any:
    """The kernels, where they can read these heads."""
    width = tensors[0].shape[3]
    fit = width >= 16 and not width & (width - 1) and all(x.stride()[2:] == (width, 1) for x in tensors)
    if not fit or tensors[0].dtype not in (torch.bfloat16, torch.float16) or not has_triton():
        return None
    return import_module("whisfusion.attention_triton")


def _differs(found: Tensor, expected: Tensor) -> bool:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return not error.item() <= _TOLERANCE


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _graph_clock(run: Callable[[], Tensor]) -> Callable[[], float]:
    """Milliseconds by the GPU's clock of `run`, replayed as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def milliseconds(work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            work()
            end.record()
        end.synchronize()
        return start.elapsed_time(end)

    milliseconds(run)  # it is compiled, and libraries set themselves up
    runs = max(1, min(_RUNS, round(_MILLISECONDS / milliseconds(run))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(runs):
                run()
        finally:
            graph.capture_end()
    return lambda: milliseconds(graph.replay) / runs
