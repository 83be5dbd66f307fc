"""One code path for one process and for many: the ranks of a run, and how the decoder is spread over them.

Under torchrun the decoder is sharded with FSDP2; a lone process computes the same without any of it.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from whisfusion.train.objective import Objective

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Ranks:
    """Which process this is, of how many, on which device."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place, without waiting for the device."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: _Value) -> list[_Value]:
        """Every rank's `value`, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def share(self, value: _Value) -> _Value:
        """Rank 0's `value`, on every rank."""
        return self.gather(value)[0]

    def wait(self) -> None:
        """Go on when all ranks have come here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def join_ranks(device: torch.device) -> Generator[Ranks]:
    """The process group that torchrun's environment describes, or this process alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Objects and stop requests travel over gloo, so that they never wait for the GPU.
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, device_id=device if device.type == "cuda" else None)
    try:
        ranks = Ranks(device, dist.get_rank(), world)
        yield ranks
        # None leaves while another may still need it.
        ranks.wait()
    finally:
        dist.destroy_process_group()


def shard(objective: Objective, ranks: Ranks, precision: str) -> None:
    """Spread the parameters over the ranks, block by block; nothing to do for a lone process.

    Cross-attention keys and values are computed for all blocks before the first of them runs, so they are
    units of their own.
    """
    if ranks.world == 1:
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in objective.decoder.blocks:
        listening: list[nn.Module] = [block.cross_attn.k, block.cross_attn.k_norm, block.cross_attn.v]
        fully_shard(listening, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)


class StopSignal:
    """Asks all ranks to stop at the same step once any of them was told to.

    Each step starts a reduction of one flag on the host and reads the one that the step before started: no
    rank waits, and all see the same answer.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.told = False
        self._ranks = ranks
        self._pending: tuple[Tensor, Any] | None = None

    def __call__(self) -> bool:
        """Whether to stop now; to be asked once a step by every rank."""
        if self._ranks.world == 1:
            return self.told
        answer = False
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            answer = bool(flag.item())
        flag = torch.tensor([float(self.told)])
        self._pending = flag, dist.all_reduce(flag, async_op=True)
        return answer
