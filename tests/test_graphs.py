"""What is kept of graphs, and what is packed, with a stand-in for CUDA's capture."""

import pytest
import torch
from torch import Tensor

from whisfusion.graphs import Captured, Graphs, Packing, to_host

CPU = torch.device("cpu")


class Standin:
    """A graph that does its work again, in place."""

    def __init__(self, work, inputs, outputs):
        self.parts = work, inputs, outputs

    def replay(self):
        work, inputs, outputs = self.parts
        for name, value in work(inputs).items():
            outputs[name].copy_(value)


@pytest.fixture
def graphs(monkeypatch) -> Graphs:
    def capture(self, work, inputs):
        captures.append(work)
        outputs = work(inputs)
        return Captured(Standin(work, inputs, outputs), inputs, outputs)

    captures = []
    monkeypatch.setattr(Graphs, "_capture", capture)
    made = Graphs(CPU, limit=3)
    made.captures = captures  # ty: ignore
    return made


def double(inputs):
    return {"twice": 2 * inputs["x"]}


def run(graphs: Graphs, key, value: float) -> float:
    return graphs(key, double, {"x": torch.tensor([value])})["twice"].item()


def test_work_is_captured_once_and_sees_new_inputs(graphs):
    assert [run(graphs, "a", value) for value in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert len(graphs.captures) == 1


def test_the_graph_that_was_not_used_for_longest_is_given_up(graphs):
    for key in "abc":
        run(graphs, key, 1.0)
    run(graphs, "a", 1.0)
    run(graphs, "d", 1.0)
    assert len(graphs) == 3
    assert [key for key in "abcd" if key in graphs] == ["a", "c", "d"]
    assert len(graphs.captures) == 4
    assert run(graphs, "b", 5.0) == 10.0
    assert len(graphs.captures) == 5


def test_results_of_another_graph_are_read_where_they_are(graphs):
    def chain(value: float) -> tuple[Tensor, Tensor]:
        first = graphs("first", double, {"x": torch.tensor([value])})["twice"]
        return first, graphs("second", double, {"x": first})["twice"]

    first, second = chain(1.0)
    assert second.item() == 4.0
    assert graphs._kept["second"].inputs["x"] is first
    assert chain(3.0)[1].item() == 12.0
    # Captured again, the first writes elsewhere: the second is still given what it wrote.
    graphs._forget("first")
    assert chain(5.0)[1].item() == 20.0
    assert graphs._kept["second"].inputs["x"] is first


def test_what_is_given_is_not_kept_by_reference(graphs):
    given = torch.tensor([1.0])
    graphs("a", double, {"x": given})
    given.fill_(7.0)
    assert graphs._kept["a"].inputs["x"].item() == 1.0


def test_packing_gives_back_what_was_packed():
    values = {
        "flags": torch.tensor([[True, False, True]]),
        "ids": torch.arange(10).unflatten(0, (2, 5))[:, 1],
        "numbers": torch.rand(2, 3, 1),
        "small": torch.arange(4, dtype=torch.int32).view(2, 2).t(),
        "none": torch.zeros(0, 3),
    }
    found = to_host(values)
    assert set(found) == set(values)
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    assert Packing.of(values).size == 3 + 2 * 8 + 6 * 4 + 4 * 4
    values["numbers"].zero_()
    assert found["numbers"].any()
