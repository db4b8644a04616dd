"""Data and tensor parallelism that puts its collectives into the graph."""

from overlapc.parallel.access import FSDPModule, no_sync
from overlapc.parallel.adopt import adopt_fsdp2
from overlapc.parallel.fsdp import MixedPrecisionPolicy, fully_shard
from overlapc.parallel.guards import trust_modules

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "adopt_fsdp2", "fully_shard", "no_sync", "trust_modules"]
