from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapc.errors import ScheduleError
from overlapc.schedule.model import Buffer, Comm, Estimate, Kind, Node, Origin, Schedule, Work
from overlapc.schedule.text import parse
from tests.graphs import schedules

EVERYTHING = Schedule(
    "a step",
    (
        Node(
            "op0", Kind.START, "all_gather_into_tensor", ("shard",), ("full",), after=("op1",),
            comm=Comm("all_gather", 4096, "dp:1", 8, "bf16", (0, 1, 2, 8), "layers.0"),
            estimate=Estimate(1180.5, "table h200-nvlink"),
        ),
        Node(
            "op1", Kind.EXTERN, "aten::mm", ("x", "v"), ("y", "x2"), ("x",), work=Work(7, 8, 9, "bf16", "rows"),
            scratch_bytes=3,
        ),
        Node("assert0", Kind.NOOP, "assert finite", ("y",)),
        Node("op2", Kind.WAIT, "wait", ("full",), ("w",), estimate=Estimate(0.0, "free")),
        Node("op3", Kind.WAIT, "wait", ("full",), ("w2",)),
        Node("op4", Kind.COMM, "?", ("w",), ("z",), comm=Comm("?", 5, "tp", 0, "", (), "", 4, True, "", "avg")),
        Node("op5", Kind.VIEW, "slice", ("z", "y"), ("z0",), work=Work()),
    ),
    {
        buffer.name: buffer
        for buffer in (
            Buffer("shard", 512, is_input=True, freeable=True), Buffer("x", 3 * 2**20 + 1, is_input=True),
            Buffer("v", 0, "x", is_input=True), Buffer("full", 4096), Buffer("y", 0), Buffer("x2", 0, "v"),
            Buffer("w", 0, "full"), Buffer("w2", 7), Buffer("z", 0), Buffer("z0", 0, "y"), Buffer("unused", 1),
        )
    },
    ("y", "w"),
    12 * 2**30,
)  # fmt: skip


def test_everything_that_equality_covers_survives_the_text():
    assert parse(str(EVERYTHING)) == EVERYTHING


@given(schedules())
@settings(max_examples=100)
def test_random_schedules_survive_the_text(schedule):
    assert parse(str(schedule)) == schedule


def test_the_transport_of_a_collective_survives_the_text():
    schedule = parse("rs = reduce_scatter(a, b) @dp(4) via copy unit=m : 4MiB 3us; ag = all_gather(c) @dp(4) : 1MiB")
    assert [node.queue for node in schedule.starts()] == ["dp via copy", "dp"]
    assert {node.group for node in schedule.starts()} == {"dp"}
    assert parse(str(schedule)) == schedule
    with pytest.raises(ScheduleError, match="no transport named 'coppy'; nearest: copy"):
        parse("rs = reduce_scatter(a) @dp via coppy")


def test_the_example_of_the_design_document_parses():
    schedule = parse("""
        schedule llama_fwd  budget=12.0GiB
        %p0    = input                      : 64MiB
        ag0    = all_gather(%p0) @dp        : 512MiB  1180us
        %w0    = wait(ag0)
        mm0    = kernel(%x, %w0)            : 96MiB   640us
    """)
    assert schedule.budget_bytes == 12 * 2**30
    assert schedule.node("ag0").comm == Comm("all_gather", 512 * 2**20, "dp", 0)
    assert schedule.node("mm0").estimate == Estimate(640e3, "given")
    assert schedule.buffers["%x"] == Buffer("%x", 0, is_input=True)
    assert schedule.root("%w0") == "ag0"


def test_omitted_parts_of_a_text_have_defaults():
    schedule = parse("""
        x = input : 4KiB
        full = all_gather(x) @dp(2) : 8KiB
        w = wait(full)
        a, b = view(w, x)
        c, d = view(w)
        nothing = view()
        y, z = kernel(a)
        scattered = reduce_scatter(w) @dp(2) : 4KiB
        schedule = kernel(y)
        return = kernel(y)
    """)
    aliases = {"w": "full", "a": "w", "b": "x", "c": "w", "d": "w"}
    sizes = {"x": 4096, "full": 8192, "scattered": 4096}
    for name, buffer in schedule.buffers.items():
        assert buffer == Buffer(name, sizes.get(name, 0), aliases.get(name), is_input=name == "x")
    assert schedule.node("full").kind is Kind.START
    assert schedule.node("scattered").comm.bytes == 8192  # the storage of its input
    assert [node.name for node in schedule.nodes[-2:]] == ["schedule", "return"]
    assert (schedule.outputs, schedule.budget_bytes) == ((), None)
    assert parse("schedule budget=4KiB").budget_bytes == 4096


def test_a_text_omits_defaults():
    text = """\
schedule s
x    = input                            : 4KiB
full = all_gather(x) @dp(2)             : 8KiB  2us
w    = wait(full)
y    = kernel(w)
e0   = extern:mm(y) flops=0 in=bf16     : none  1us [table]
return y
"""
    assert str(parse(text)) == text
    assert str(Schedule("s", (), {})) == "schedule s\n"


def test_a_reduction_moves_what_it_reads():
    schedule = parse("g = input : 4KiB; rs = reduce_scatter(g) @dp(4) : 1KiB; ar = all_reduce(g) @dp(4) : 4KiB")
    assert schedule.node("rs").comm.bytes == 4096
    assert schedule.node("ar").comm.bytes == 4096


def test_origins_print_as_comments():
    node = Node("y", Kind.KERNEL, "kernel", (), ("y",), origin=Origin(("mm_3",), "model.py:31: x @ w", "layers.0"))
    text = str(Schedule("s", (node,), {"y": Buffer("y", 0)}))
    assert text.splitlines()[1].endswith("# mm_3 | layers.0 | model.py:31: x @ w")
    assert parse(text).nodes == (node,)


@pytest.mark.parametrize(
    "origin",
    [
        Origin(("mm_3", "add"), "model.py:31: x | w | 2", "layers.0"),
        Origin((), "model.py:31", "layers.0"),
        Origin(("mm_3",), "", "layers.0"),
        Origin(("mm_3",), "model.py:31"),
        Origin((), "", "layers.0"),
    ],
)
def test_a_comment_that_is_an_origin_reads_back(origin):
    text = str(Schedule("s", (Node("y", Kind.KERNEL, "kernel", (), ("y",), origin=origin),), {"y": Buffer("y", 0)}))
    assert parse(text).nodes[0].origin == origin
    assert parse("y = kernel()  # as written by hand").nodes[0].origin == Origin()


def test_a_longer_name_does_not_realign_other_lines():
    short, long = (str(parse(f"a = kernel(x); {name} = kernel(a)")) for name in ("b", "bcd"))
    assert short.splitlines()[:3] == long.splitlines()[:3]


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("a = mm(b)", "line 1: 'mm' is not a collective or a kind of node; write kernel:mm or extern:mm", 4),
        ("a = kernel(b", "line 1: expected ')' after the reads", 12),
        ("x = kernel(a)\na = kernel(b) : 3Mi", "line 2: '3Mi' is not a time", 16),
        ("a = kernel(b) aftr=c", "line 1: no key named 'aftr'; nearest: after", 14),
        ("a = kernel(b); a = kernel(c)", "line 1: a is defined a second time", 28),
        ("a = kernle:x(b)", "line 1: no kind of node named 'kernle'; nearest: kernel", 4),
        ("a ? b", "line 1: unexpected character '?'", 2),
        ("a = kernel(b) dtype=bf16", "line 1: dtype= needs a group: write @dp before it", 24),
        ("a = kernel(b); c = kernel(b) node=a", "line 1: a second node named a", 35),
        ("a = kernel(b c)\nd = kernel(a)", "line 1: expected ')' after the reads", 13),
        ("a = kernel(,)", "line 1: expected a name", 11),
        ("a = kernel(b) flops=many", "line 1: 'many' is not a whole number", 20),
        ("a = kernel(b) flops=1 flops=2", "line 1: flops= is given twice", 22),
        ("a = kernel(b) read=", "line 1: expected a size", 19),
        ("a = kernel(b) in=bf16,fp32", "line 1: unexpected token", 21),
        ('a = kernel(b) : 1us "measured"', "line 1: unexpected token", 20),
        ("a = kernel(b) : [measured]", "line 1: unexpected token", 16),
        ("a = all_gather(b) @dp ranks=0,x", "line 1: 'x' is neither a rank nor a range like 0-7", 30),
        ("a = all_gather(b) @dp ranks=0-", "line 1: '0-' is neither a rank nor a range like 0-7", 28),
        ("a = all_gather(b) @dp ranks=3-1", "line 1: '3-1' is neither a rank nor a range like 0-7", 28),
        ("a = input(b)", "line 1: 'input' is not a collective or a kind of node", 4),
    ],
)
def test_errors_point_at_the_place(text, message, column):
    with pytest.raises(ScheduleError) as error:
        parse(text)
    first, line, caret = str(error.value).splitlines()
    assert first.startswith(message)
    assert line[3:] in text.splitlines()
    assert caret == "   " + " " * column + "^"


@pytest.mark.parametrize("source", ["measured run[2].json", "two\nlines", '"quoted"', "", "a # b; c"])
def test_any_source_of_an_estimate_is_read_back(source):
    node = Node("y", Kind.KERNEL, "kernel", (), ("y",), estimate=Estimate(1.0, source))
    schedule = Schedule("s", (node, replace(node, name="z", writes=("z",))), {name: Buffer(name, 0) for name in "yz"})
    assert parse(str(schedule)) == schedule


def test_a_group_without_a_name_is_still_a_group():
    schedule = parse('y = comm(x) @"" moves=8B')
    assert schedule.node("y").comm == Comm("comm", 8, "", 0)
    assert parse(str(schedule)) == schedule
