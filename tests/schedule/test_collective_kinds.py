"""The table of collectives, what is derived from it, and how the simulator treats copies as a separate queue."""

import torch

from overlapc.estimators.timeline import simulate
from overlapc.schedule.collective_kinds import COPY, KINDS, LIBRARY, several_in_one
from overlapc.schedule.text import parse

TWO = "a = all_gather(p) @dp : 4MiB 9us; b = reduce_scatter(q) @dp{via} : 4MiB 7us; w = wait(a); v = wait(b)"


def test_every_kind_names_an_op_of_torch_that_has_the_coalesced_form_it_claims():
    for kind in KINDS.values():
        assert hasattr(torch.ops._c10d_functional, kind.op), kind
        assert hasattr(torch.ops._c10d_functional, f"{kind.op}_coalesced") == kind.coalesced, kind


def test_only_collectives_that_copies_support_share_a_launch_of_copies():
    assert [name for name in KINDS if several_in_one(name, COPY)] == ["all_gather", "all_to_all"]
    assert [name for name in KINDS if several_in_one(name, LIBRARY)] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert not several_in_one("unknown", LIBRARY)


def test_copies_overlap_library_collectives_of_the_same_group():
    for via, step_us in (("", 16), (" via copy", 9)):
        schedule = parse(TWO.format(via=via))
        assert simulate(schedule).step_ns == 1e3 * step_us
