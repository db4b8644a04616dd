import pytest
from hypothesis import given, settings

from overlapc.errors import ScheduleError
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import schedules

GOOD = "ag0 = all_gather(%p0) @dp; ag1 = all_gather(%p1) @dp; %w0 = wait(ag0); %w1 = wait(ag1); %y = kernel(%w0, %w1)"


def complaint(text, **options):
    with pytest.raises(ScheduleError) as error:
        verify(parse(text), "sink_waits", **options)
    return str(error.value)


def test_the_error_shows_the_lines_and_what_to_do():
    assert complaint("ag0 = all_gather(%p0) @dp; %y = kernel(%h, %w0); %w0 = wait(ag0)") == (
        "sink_waits: %y reads %w0 before it is waited for\n"
        "   ag0 = all_gather(%p0) @dp\n"
        " > %y = kernel(%h, %w0)\n"
        "   %w0 = wait(ag0)\n"
        "hint: OVERLAPC_DUMP=passes writes the schedule before and after every pass"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y = kernel(a); a = kernel(x)", "y reads a before a defines it"),
        ("a = buffer; y = kernel(a)", "y reads a, which is neither an input nor written by a node"),
        ("w = wait(x)", "w waits for nothing"),
        ("a = all_gather(p) @dp; w = wait(a); v = wait(a)", "v waits for a, which w already waits for"),
        (
            "a = all_gather(p) @dp; y = kernel(a); w = wait(a)",
            "y reads a, a result of a, instead of its wait's result",
        ),
        ("a = all_gather(p) @dp; v = view(a); y = kernel(v); w = wait(a)", "y reads v, a result of a"),
        ("y = kernel(x) mutates=x", "y overwrites x but defines no alias of it"),
        ("y = kernel(x) after=z; z = kernel(x)", "y comes before z, but must come after it"),
        ("y = kernel(x); return z", "the output z is not a buffer"),
    ],
)
def test_each_broken_rule_is_an_error(text, message):
    assert f"sink_waits: {message}" in complaint(text)


def test_nodes_may_not_come_or_go():
    assert "%y is missing" in complaint("a = kernel(x)", reference=parse("a = kernel(x); %y = kernel(x)"))
    assert "%y is not a node of the original schedule" in complaint(
        "a = kernel(x); %y = kernel(x)", reference=parse("a = kernel(x)")
    )


def test_a_moved_schedule_keeps_the_order_of_its_group():
    moved = parse(GOOD).move("ag1", before="ag0")
    with pytest.raises(ScheduleError, match="ag1 was moved before ag0 of the same process group"):
        verify(moved, "raise")


def test_a_rebuilt_schedule_keeps_the_order_of_its_group_unless_allowed():
    swapped = "ag1 = all_gather(%p1) @dp; ag0 = all_gather(%p0) @dp;" + GOOD.partition("@dp; ag1")[2].partition(";")[2]
    assert "ag1 starts in the place of ag0 on dp" in complaint(swapped, reference=parse(GOOD))
    verify(parse(swapped), "bucket", reference=parse(GOOD), may_reorder_collectives=True)


def test_an_overwritten_buffer_is_not_read_late():
    moved = parse("r = kernel(x); m = kernel(x) mutates=x : =x").move("m", before="r")
    with pytest.raises(ScheduleError, match="one overwrites a buffer of the other"):
        verify(moved, "fusion")


def test_memory_is_as_claimed():
    assert "needs 3KiB at its peak, but claims at most 2KiB" in complaint(
        "a = kernel(x) : 1KiB; b = kernel(a) : 2KiB", limit_bytes=2048
    )


def test_a_barrier_is_not_crossed():
    moved = parse("c = comm:send(x) @pp; a = all_gather(x) @dp; w = wait(a)").move("a", before="c")
    with pytest.raises(ScheduleError, match="one is a barrier for communication"):
        verify(moved, "raise")


def test_each_output_of_a_coalesced_start_may_be_waited_for():
    verify(parse("a, b = all_gather(p, q) @dp; w = wait(a); v = wait(b)"), "test")


@given(schedules())
@settings(max_examples=100)
def test_random_schedules_are_legal(schedule):
    verify(schedule, "test", reference=schedule)
