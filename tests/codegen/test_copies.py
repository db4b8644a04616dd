"""Collectives of a schedule that run by copies: their slots in the pool, and when a slot may be reused."""

from types import SimpleNamespace

import pytest

from overlapc.codegen.copies import copying, forms_of, peak_with_pools
from overlapc.errors import ScheduleError
from overlapc.runtime.copies.commands import HEAD_BYTES
from overlapc.runtime.copies.pool import Form
from overlapc.schedule.memory import analyze
from overlapc.schedule.pools import pooled
from overlapc.schedule.text import parse

STEP = """
    p = input : 1KiB; g = input : 8KiB
    a = all_gather(p) @dp(4) via copy ranks=0-3 : 4KiB; w = wait(a); x = kernel(w) : 8KiB
    b = all_to_all(x) @dp(4) via copy ranks=0-3 : 8KiB; n = all_reduce(g) @dp(4) ranks=0-3 : 8KiB; m = wait(n)
    c = all_to_all(g) @dp(4) via copy ranks=0-3 : 8KiB; v = wait(b); s = kernel(v) : 2KiB
    u = wait(c); t = kernel(u) : 2KiB
    d = all_to_all(t) @dp(4) via copy ranks=0-3 : 8KiB; z = wait(d); r = kernel(z, s) : 2KiB
    return r
"""


def test_slots_are_reused_once_their_collective_has_been_read():
    graph = copying(parse(STEP))
    layouts = graph.laid_out()
    found = graph.on(layouts, {"dp": SimpleNamespace(name="dp")})
    assert {name: each.index for name, each in found.items()} == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert {name: sorted(each.held) for name, each in found.items()} == {"a": ["a"], "b": ["b"], "c": ["c"], "d": ["d"]}
    layout = found["a"].copies.layout
    room = 8192
    # a is read before b starts, so b reuses its slot; b is read later, so c is behind it; d reuses b's slot.
    assert [slot.offset - HEAD_BYTES for slot in layout.slots] == [0, 0, room, 0]
    assert [begin.needed for begin in layout.begins] == [-1, 0, -1, 1]
    assert [begin.settled for begin in layout.begins] == [-1, 0, 0, 2]
    (each,) = graph.wanted(layouts, {"dp": "17"})
    assert (each.group, each.name, each.ranks, each.bytes) == ("17", "dp", (0, 1, 2, 3), HEAD_BYTES + 2 * room)


@pytest.mark.parametrize(
    "text",
    [
        "a = all_gather(p) @dp(4) via copy : 4KiB; k = kernel(p) : 1KiB; return k",
        "g = all_gather(p) @dp(4) via copy : 4KiB; w = wait(g); a = all_reduce(w) @dp(4) : =w",
    ],
    ids=["by copies", "reading what copies gathered"],
)
def test_a_start_that_is_never_waited_for_is_named(text):
    schedule = parse(f"p = input : 1KiB; {text}")
    with pytest.raises(ScheduleError, match="a uses memory of collectives by copies, and is never waited for"):
        copying(schedule)


def test_peak_memory_counts_a_pool_once():
    one = parse(
        "g = input : 8KiB; b = all_to_all(g) @dp(4) via copy : 8KiB; w = wait(b); s = kernel(w) : 2KiB; return s"
    )
    assert (analyze(one).peak_bytes, analyze(one).pool_bytes) == ((8 + 2 + 8) * 1024, 8 * 1024)
    assert peak_with_pools(one) == (8 + 2 + 8) * 1024 + HEAD_BYTES


def test_a_kernel_stores_a_shard_in_its_slot_which_is_in_use_from_then_on():
    schedule = parse("""
        p = input : 2KiB; c = kernel(p) : 1KiB; b = all_to_all(p) @dp(4) via copy ranks=0-3 : 2KiB; v = wait(b)
        s = kernel(v) : 1KiB; a = all_gather(c) @dp(4) via copy ranks=0-3 : 4KiB; w = wait(a); y = kernel(w, s) : 1KiB
        return y
    """)
    graph = copying(schedule)
    layouts = graph.laid_out()
    assert [slot.offset - HEAD_BYTES for slot in layouts["dp"].slots] == [4096, 0], "by start: b, a"
    assert graph.on(layouts, {"dp": SimpleNamespace(name="dp")})["a"].shards == {"c": 0}
    memory = analyze(schedule)
    assert (memory.pool_bytes, memory.peak_bytes) == (6 * 1024, (2 + 6 + 2) * 1024), "the shard itself takes nothing"


def test_a_kernel_stores_a_shard_where_peers_fetch_it_if_the_gathers_result_outlives_the_graph():
    schedule = parse("""
        p = input : 2KiB; c = kernel(p) : 1KiB; a = all_gather(c) @dp(4) via copy ranks=0-3 : 4KiB; w = wait(a)
        y = kernel(w) : 1KiB; d = kernel(y) : 1KiB; b = all_gather(d) @dp(4) via copy ranks=0-3 : 4KiB; v = wait(b)
        return w, v
    """)
    graph = copying(schedule)
    layouts = graph.laid_out()
    assert layouts["dp"].slots[0] == layouts["dp"].slots[1], "free again after the wait"
    found = graph.on(layouts, {"dp": SimpleNamespace(name="dp")})
    assert [(found[name].shards, found[name].held) for name in "ab"] == [({"c": 0}, set()), ({"d": 0}, set())]
    memory = analyze(schedule)
    assert (memory.pool_bytes, memory.peak_bytes) == (1024, (2 + 4 + 4 + 1) * 1024)


@pytest.mark.parametrize(
    ("shard", "reads", "returns"),
    [
        ("c = input : 1KiB", "w", "y"),
        ("c = extern:mm(p) : 1KiB", "w", "y"),
        ("c = kernel(p) : 1KiB", "w, c", "y"),
        ("c = kernel(p) : 1KiB", "w", "y, c"),
    ],
)
def test_a_shard_without_its_own_kernel_or_with_other_readers_is_copied_to_its_slot(
    shard: str, reads: str, returns: str
):
    gather = "a = all_gather(c) @dp(4) via copy ranks=0-3 : 4KiB; w = wait(a)"
    schedule = parse(f"p = input : 1KiB; {shard}; {gather}; y = kernel({reads}) : 1KiB; return {returns}")
    assert pooled(schedule).written == {}


def test_a_schedule_without_copies_needs_no_pool():
    graph = copying(parse(STEP.replace(" via copy", "")))
    assert graph.wanted(graph.laid_out(), {}) == []
    assert graph.on({}, {}) == {}


@pytest.mark.parametrize(("keeps", "form", "size"), [("y", Form.GATHERED, 4096), ("y, w", Form.PULLED, 1024)])
def test_a_gather_whose_result_the_graph_returns_is_pulled(keeps: str, form: Form, size: int):
    gather = "a = all_gather(p) @dp(4) via copy ranks=0-3 : 4KiB; w = wait(a)"
    schedule = parse(f"p = input : 1KiB; {gather}; y = kernel(w) : 8KiB; return {keeps}")
    assert forms_of(schedule) == {"a": form}
    graph = copying(schedule)
    layouts = graph.laid_out()
    (wanted,) = graph.wanted(layouts, {"dp": "17"})
    assert bool(graph.on(layouts, {"dp": SimpleNamespace(name="dp")})["a"].held) == (form is Form.GATHERED)
    assert wanted.bytes == HEAD_BYTES + size


def test_an_exchange_whose_result_the_graph_returns_is_taken_out():
    schedule = parse("b = all_to_all(x) @dp(2) via copy ranks=0-1 : 8KiB; v = wait(b); return v")
    graph = copying(schedule)
    assert forms_of(schedule) == {"b": Form.TAKEN_OUT}
    assert graph.on(graph.laid_out(), {"dp": SimpleNamespace(name="dp")})["b"].held == set()
    assert analyze(schedule).pool_bytes == 0
