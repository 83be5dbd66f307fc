"""Which kernel attends, with stand-ins for the kernels and for the clock."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from whisfusion import attention
from whisfusion.attention import TILES, Fastest, Tiles, candidates

FAST, BROKEN, WRONG, SLOW = TILES


class Kernels:
    """Attention that notes its tiles."""

    def __init__(self) -> None:
        self.used: list[Tiles | None] = []

    def attention(self, *given, causal, tiles) -> Tensor:
        self.used.append(tiles)
        if tiles[:4] == BROKEN[:4]:
            raise RuntimeError("out of resource: shared memory")
        return attention.plain(*given, causal=causal) + (tiles[:4] == WRONG[:4])


@pytest.fixture
def kernels(monkeypatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(attention, "_own", lambda *tensors: kernels)
    monkeypatch.setattr(attention, "_processors", lambda device: 132)
    return kernels


def clock_of(kernels: Kernels, times: dict[Tiles | None, float]):
    """Tells a kernel by what it runs; torch's own takes one millisecond."""

    def clock(run):
        kernels.used.append(None)
        run()
        return lambda tiles=kernels.used[-1]: times.get(tiles, 2.0)

    return clock


def heads(queries: int = 80, keys: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(2, queries, 3, 16, generator=generator),
        *torch.randn(2, 2, keys, 3, 16, generator=generator).unbind(),
    )


@pytest.mark.parametrize(("milliseconds", "chosen"), [(0.5, FAST), (0.99, None), (1.5, None)])
def test_the_fastest_is_taken_if_it_is_clearly_faster(kernels, caplog, milliseconds, chosen):
    attend = Fastest(clock_of(kernels, {None: 1.0, FAST: milliseconds}))
    for _ in range(2):
        torch.testing.assert_close(attend(*heads()), attention.plain(*heads()))
    assert list(attend.chosen.values()) == [chosen]
    assert [record.message for record in caplog.records if "wrong" in record.message]


def test_each_size_is_tried_once(kernels):
    attend = Fastest(clock_of(kernels, {None: 1.0, FAST: 0.5}))
    attend(*heads())
    tried = len(kernels.used)
    attend(*heads(queries=90, keys=120))
    assert len(kernels.used) == tried + 1  # as many tiles
    attend(*heads(), causal=False, bias_GT=torch.zeros(2, 100))
    assert len(attend.chosen) == 2


def test_without_a_gpu_it_is_torchs_own():
    attend = Fastest()
    assert torch.equal(attend(*heads()), attention.plain(*heads()))
    assert not attend.chosen


def test_kernels_are_for_half_precision_and_heads_side_by_side(monkeypatch):
    monkeypatch.setattr(attention, "has_triton", lambda: True)
    monkeypatch.setattr(attention, "import_module", lambda name: SimpleNamespace(name=name))
    half = [x.bfloat16() for x in heads()]
    assert attention._own(*half) is not None
    assert attention._own(*heads()) is None
    assert attention._own(*(x.transpose(1, 2) for x in half)) is None


def test_keys_are_divided_where_there_are_few_queries():
    few = list(candidates(192, 1500, heads=20, processors=132))
    many = list(candidates(1500, 1500, heads=640, processors=132))
    assert many == list(TILES)
    assert max(tiles.parts for tiles in few) == 8
    assert all(tiles.rows == 64 for tiles in candidates(20, 1500, heads=20, processors=132))
