import pytest

from overlapc.schedule.model import Estimate
from overlapc.schedule.text import parse
from tests.graphs import peak
from tests.passes.buckets import bucketed, passes_of, units


def test_modules_whose_gathers_are_mostly_latency_share_a_bucket():
    latency, _ = bucketed(units(11))
    assert [node.name for node in latency.starts()] == ["a0+3"]
    some, _ = bucketed(units(16))
    assert [node.name for node in some.starts()] == ["a0+1", "a2+1"], "two gathers overlap the compute of two modules"
    enough, _ = bucketed(units(60))
    assert [node.name for node in enough.starts()] == ["a0", "a1", "a2", "a3"]


def test_the_latency_is_that_of_the_process_group():
    """In a large group, the latency grows with the number of ranks: there, 60 us are mostly latency."""

    def slow_start(node):
        return Estimate(55e3 + node.comm.bytes * 1e3, "asked")

    moved, _ = bucketed(units(60), estimate=slow_start)
    assert [node.name for node in moved.starts()] == ["a0+3"]


def test_modules_are_joined_only_where_that_is_faster():
    """The second module's parameter is computed; the first module's gather would have to wait for that."""
    text = """
        a = all_gather(p) @dp unit=m : 8B 15us; u = wait(a); y = kernel(u) : 0B 500us
        c = kernel(y) : 8B 1us; b = all_gather(c) @dp unit=n : 8B 15us; v = wait(b); z = kernel(v) : 0B 5us
    """
    moved, _ = bucketed(text)
    assert [node.name for node in moved.starts()] == ["a", "b"]


def test_modules_are_not_joined_where_separate_buckets_are_faster():
    """Joined, they take 14us, and both kernels run afterwards. Apart, the first kernel begins after 12us and overlaps
    the second bucket."""
    moved, _ = bucketed(passes_of((11, 11), (11, 5)))
    assert [node.name for node in moved.starts()] == ["a0+1", "a1+1"]
    moved, _ = bucketed(passes_of((11, 5), (11, 5)))
    assert [node.name for node in moved.starts()] == ["a0+3"]


@pytest.mark.parametrize(
    "text",
    [
        "warm = kernel(x) : 0B 900us;" + units(11, 2),  # both are hidden
        units(11, 2).replace("@dp unit=m1 : 8B 11us", "@dp unit=m1 : 8B 60us"),  # the second is long
        # the first is hidden, as it is needed last
        """
        a0 = all_gather(p) @dp unit=m0 : 8B 11us; a1 = all_gather(p) @dp unit=m1 : 8B 11us
        w1 = wait(a1); k1 = kernel(w1) : 0B 900us; w0 = wait(a0); k0 = kernel(w0) : 0B 5us
        """,
    ],
    ids=["covered", "long", "first-covered"],
)
def test_only_exposed_modules_that_are_mostly_latency_are_joined(text):
    moved, _ = bucketed(text)
    assert [node.name for node in moved.starts()] == ["a0", "a1"]


def test_modules_are_not_joined_past_a_collective_of_no_module():
    """All collectives are mostly latency; the one in the middle belongs to no module."""
    moved, _ = bucketed(units(11, 3).replace(" unit=m1", ""))
    assert [node.name for node in moved.starts()] == ["a0", "a1", "a2"]


def test_memory_cuts_buckets_in_halves_and_then_refuses_them():
    def layer(at: int) -> str:
        return f"""
            a{at} = all_gather(p{at}) @dp unit=m : 8B 60us; w{at} = wait(a{at}); k{at} = kernel(w{at}, x) : 0B 99us
        """

    text = "warm = kernel(x) : 0B 900us\n" + "\n".join(layer(at) for at in range(4))
    free = peak(parse(text))
    assert len(bucketed(text, budget_bytes=free + 24)[0].starts()) == 1
    # Two halves fit. The second half can start only late because of memory, so it is cut as well.
    assert [node.name for node in bucketed(text, budget_bytes=free + 8)[0].starts()] == ["a0+1", "a2", "a3"]
    moved, reasons = bucketed(text, budget_bytes=free)
    assert len(moved.starts()) == 4
    assert reasons == {f"a{at}": "peak memory" for at in range(4)}
