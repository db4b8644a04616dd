"""A process group without other ranks: torch's fake one, on which graphs with collectives are traced and planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[str]:
    """This process is one rank of `size`, and nothing is communicated; gives the name of the whole group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
