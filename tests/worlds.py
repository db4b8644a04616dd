"""torch's fake process group, with which one process traces and plans graphs that have collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_rules_of_dtensors
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[str]:
    """Make this process one rank of `size` without communicating; yields the name of the default group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
        clear_rules_of_dtensors()  # they hold meshes over this world's groups, and equal meshes of another find them
