"""Which ranks' memory copies can reach, by what ranks tell each other about their hosts and devices."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from overlapc.config import Config
from overlapc.estimators.agreement.rank_agreement import GraphAgreement
from overlapc.planning.host_groups import hosts_of, process_groups
from overlapc.runtime.copies.commands import MOST_RANKS
from overlapc.runtime.copies.shared_memory import FOLDER


@dataclass(frozen=True)
class CopyReach:
    """What ranks told each other: the same on all of them."""

    places: Mapping[int, Mapping[str, object]] = field(default_factory=dict)  # by rank: host, device, process groups
    groups: Collection[Sequence[int]] = ()  # the groups, of all ranks, that copies are asked for
    none: str = ""  # reason why no collective goes by copies; "" if some may

    @classmethod
    def agreed_on(
        cls,
        agreement: GraphAgreement,
        config: Config,
        device: torch.device | None,
        reason: str,
        groups: Collection[Sequence[int]] = (),
    ) -> CopyReach:
        """Ranks meet once. reason: why copies carry nothing, as this rank sees it; "" with the `device` they are on."""
        mine = {
            "reason": reason,
            "groups": process_groups(),
            "copied": list(groups),
            **({} if device is None else _place(device)),
        }
        if config.ranks_per_host is not None:
            mine["host"] = f"{mine.get('host')}, {dist.get_rank() // config.ranks_per_host}"
        told = [json.loads(text) for text in agreement.tell("what can carry collectives", json.dumps(mine))]
        reason = next((each["reason"] for each in told if each["reason"]), "")
        asked = [tuple(group) for each in told for group in each.pop("copied")]
        return cls(dict(zip(agreement.ranks, told, strict=True)), asked, reason)

    def apart(self, ranks: Sequence[int], device_type: str) -> str | None:
        """Reason why copies cannot reach all of these ranks."""
        known = [self.places[rank] for rank in ranks if rank in self.places]
        hosts = len({place["host"] for place in known})
        if hosts == len(ranks) > 1:
            return "its ranks are on different hosts"
        if hosts > 1:
            return "its group spans several hosts"
        if not 1 < len(ranks) <= MOST_RANKS or len(known) < len(ranks):
            return f"its group has {len(ranks)} ranks"
        if len({place["device"] for place in known}) < len(known) and device_type != "cpu":
            return "ranks of its group share a GPU"
        return None

    def hosts(self, ranks: Sequence[int]) -> list[tuple[int, ...]] | None:
        """The ranks of each host, if a group of these ranks can be divided into parts within hosts and across them."""
        if any(rank not in self.places for rank in ranks):
            return None
        hosts = hosts_of(ranks, lambda rank: self.places[rank]["host"])
        alike = len({self.places[rank].get("groups") for rank in ranks}) == 1  # or names of new groups would differ
        return hosts if alike else None


def _place(device: torch.device) -> dict[str, object]:
    """What tells a rank's host and device from others'."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else os.uname().nodename
    if device.type == "cpu":
        return {"host": f"{host}/{os.stat(FOLDER).st_dev}", "device": "cpu"}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    # torch's own switch for ranks that share a GPU: its symmetric memory refuses them without it.
    shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "") not in ("", "0")
    return {"host": host, "device": f"{uuid}/{dist.get_rank()}" if shared else uuid}
