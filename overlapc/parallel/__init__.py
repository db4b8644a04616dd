"""Data and tensor parallelism that puts its collectives into the graph."""

from overlapc.parallel.access import FSDPModule
from overlapc.parallel.fsdp import MixedPrecisionPolicy, fully_shard

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "fully_shard"]
