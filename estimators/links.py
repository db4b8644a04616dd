"""The links that a process group crosses, from its ranks; unknown ranks are assumed to be contiguous."""

from __future__ import annotations

from collections import Counter

from overlapc.estimators.device import DeviceProfile, Link
from overlapc.schedule.model import Comm

HOST, NETWORK = "host", "network"


def ranks_by_host(comm: Comm, profile: DeviceProfile) -> dict[int, int]:
    """Return host -> number of the group's ranks on it; hosts are numbered from the group's first host."""
    if not comm.ranks:
        full, rest = divmod(comm.size, profile.ranks_per_host)
        hosts = dict.fromkeys(range(full), profile.ranks_per_host)
        return {**hosts, full: rest} if rest else hosts
    counted = Counter(rank // profile.ranks_per_host for rank in comm.ranks)
    return {host: counted[key] for host, key in enumerate(sorted(counted))}


def crossed(comm: Comm, profile: DeviceProfile) -> tuple[str, Link] | None:
    """Return the name and the slowest link of a ring over the group, or None if that link is unknown.

    Between hosts, the bandwidth is that of all network cards of the group's ranks on a host together.
    """
    if comm.size < 1:
        return None
    hosts = ranks_by_host(comm, profile)
    if len(hosts) == 1:
        return None if profile.host_link is None else (HOST, profile.host_link)
    network = profile.network_link
    if network is None:
        return None
    cards = min(hosts.values())  # each local rank of the group has its own card
    if cards == 1 or profile.host_link is None:
        return NETWORK, network
    return NETWORK, Link(min(network.bytes_per_s * cards, profile.host_link.bytes_per_s), network.step_ns)
