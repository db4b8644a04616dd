"""Which ranks can copy to each other's memory: ranks exchange their hosts and devices to find out."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from overlapc.agreement.rank_agreement import GraphAgreement
from overlapc.config import Config
from overlapc.planning.host_groups import hosts_of, process_groups
from overlapc.runtime.copies.commands import MOST_RANKS
from overlapc.runtime.copies.shared_memory import FOLDER


@dataclass(frozen=True)
class CopyReach:
    """Hosts and devices of all ranks that compile a graph together; equal on all of them."""

    places: Mapping[int, Mapping[str, object]] = field(default_factory=dict)  # by rank: host, device, process groups
    groups: Collection[Sequence[int]] = ()  # ranks of each group that some rank wants to use copies for
    none: str = ""  # reason why no collective can use copies; "" if some may

    @classmethod
    def agreed_on(
        cls,
        agreement: GraphAgreement,
        config: Config,
        device: torch.device | None,
        reason: str,
        groups: Collection[Sequence[int]] = (),
    ) -> CopyReach:
        """Exchange places with the other ranks. Collective: every rank of `agreement` must call it.

        reason: why this rank cannot use copies; "" if it can, on `device`.
        """
        mine = {
            "reason": reason,
            "groups": process_groups(),
            "copied": list(groups),
            **({} if device is None else _place(device)),
        }
        if config.ranks_per_host is not None:
            mine["host"] = f"{mine.get('host')}, {dist.get_rank() // config.ranks_per_host}"
        answers = [json.loads(text) for text in agreement.exchange("hosts and devices for copies", json.dumps(mine))]
        reason = next((answer["reason"] for answer in answers if answer["reason"]), "")
        asked = [tuple(group) for answer in answers for group in answer.pop("copied")]
        return cls(dict(zip(agreement.ranks, answers, strict=True)), asked, reason)

    def apart(self, ranks: Sequence[int], device_type: str) -> str | None:
        """Return the reason why copies cannot reach all of these ranks, or None if they can."""
        known = [self.places[rank] for rank in ranks if rank in self.places]
        hosts = len({place["host"] for place in known})
        if hosts == len(ranks) > 1:
            return "its ranks are on different hosts"
        if hosts > 1:
            return "its group spans several hosts"
        if not 1 < len(ranks) <= MOST_RANKS:
            return f"its group has {len(ranks)} ranks; copies are for 2 to {MOST_RANKS}"
        if len(known) < len(ranks):
            return "ranks of its group do not compile this graph"
        if len({place["device"] for place in known}) < len(known) and device_type != "cpu":
            return "ranks of its group share a GPU"
        return None

    def hosts(self, ranks: Sequence[int]) -> list[tuple[int, ...]] | None:
        """Return the ranks of each host; None if a group of these ranks cannot be divided within and across hosts."""
        if any(rank not in self.places for rank in ranks):
            return None
        hosts = hosts_of(ranks, lambda rank: self.places[rank]["host"])
        # torch names a new group after the number of groups that a rank has: the names must be equal on all ranks.
        same_names = len({self.places[rank].get("groups") for rank in ranks}) == 1
        return hosts if same_names else None


def _place(device: torch.device) -> dict[str, object]:
    """Return identifiers of this rank's host and device."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else os.uname().nodename
    if device.type == "cpu":
        return {"host": f"{host}/{os.stat(FOLDER).st_dev}", "device": "cpu"}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    # torch's own switch for ranks that share a GPU; without it, torch's symmetric memory refuses them.
    shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "") not in ("", "0")
    return {"host": host, "device": f"{uuid}/{dist.get_rank()}" if shared else uuid}
