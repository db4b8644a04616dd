"""How a process group that spans several hosts is divided into groups within a host and groups across hosts."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from overlapc.fx.versions.sharding import resolve_group
from overlapc.planning.host_groups import DividedGroup, HostGroups, divided, divided_again, hosts_of, still_divided
from tests.worlds import fake_world


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [(0, 1), (2, 3)]),
        ("aaaa", [(0, 1, 2, 3)]),
        ("abcd", [(0,), (1,), (2,), (3,)]),
        ("abab", None),
        ("aaab", None),
        ("aabbaa", None),
    ],
)
def test_hosts_must_have_consecutive_and_equally_many_ranks(hosts, expected):
    assert hosts_of(range(len(hosts)), hosts.__getitem__) == expected


def test_a_rank_is_in_one_group_within_its_host_and_one_across_hosts_created_once():
    with fake_world(8, rank=5) as world:
        hosts = [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert divided(world, "dp", hosts, alone=True) is None
        groups = divided(world, "dp", hosts, alone=False)
        assert groups is not None
        assert dist.get_process_group_ranks(resolve_group(groups.within)) == [4, 5, 6, 7]
        assert dist.get_process_group_ranks(resolve_group(groups.across)) == [1, 5]
        assert divided(world, "dp", hosts, alone=True) is groups


def test_a_cached_graph_is_used_only_if_its_group_has_the_same_parts():
    with fake_world(8, rank=5) as world:
        hosts = [(0, 1, 2, 3), (4, 5, 6, 7)]
        kept = DividedGroup(world, "dp", tuple(range(8)), HostGroups("a", "b", hosts[1], (1, 5)))
        assert not divided_again(kept, hosts), "the parts have other names in this process"
        parts = divided(world, "dp", hosts, alone=True)
        assert parts is not None
        same = replace(kept, parts=parts)
        assert divided_again(same, hosts)
        assert still_divided(same)
        assert not still_divided(kept)
        assert not divided_again(same, [(0, 1), (2, 3), (4, 5), (6, 7)])
        assert not divided_again(same, None)
