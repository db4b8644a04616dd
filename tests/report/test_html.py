"""The HTML report is one well-formed file that shows every collective, wait and reason."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from overlapc.report import advice, html
from overlapc.report.ledger import Ceiling, Ledger, bars, tiles, utilization
from overlapc.report.model import Measured, Plan, Span, StepRecord
from overlapc.report.page_data import page_data, sequence, thinned
from overlapc.report.text import totals_text
from tests.report.sample import AFTER, FORWARD, REPORT

_VOID = {"meta", "br", "link", "input"}


class Page(HTMLParser):
    """Checks that tags close in order; collects the table cells and all links, which could reach the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("src", "href") if name in given]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_is_well_formed_and_loads_nothing():
    page = Page(html.render(REPORT.steps))
    assert page.open == []
    assert page.links == []
    assert "http" not in html.render(REPORT.steps)


def test_every_collective_is_in_the_table_with_its_reason():
    cells = Page(html.render(REPORT.steps)).cells
    for row in FORWARD.collectives:
        assert f"{row.name} {row.op}" in cells
        assert row.limit in cells


def test_text_of_the_schedule_is_escaped():
    page = html.render(REPORT.steps)
    assert "[table &lt;x&gt;]" in page
    evil = replace(FORWARD, collectives=(replace(FORWARD.collectives[0], origin="</script><b>"),))
    assert "</script><b>" not in html.render((StepRecord(graphs=(evil,)),))


def test_a_page_of_twenty_thousand_nodes_is_below_two_megabytes():
    spans = tuple(Span(f"k{at}", "compute", at * 10.0, at * 10.0 + 9.0, "kernel") for at in range(20_000))
    graph = replace(FORWARD, after=Plan(200_000.0, spans), memory=tuple((at * 10.0, at) for at in range(20_000)))
    assert len(html.render((StepRecord(0, 1, (graph,)),))) < 2_000_000


def test_thinned_memory_keeps_its_peak():
    memory = tuple((float(at), 5) for at in range(10_000))
    spike = (*memory[:777], (777.0, 9), *memory[778:])
    found = list(thinned(spike))
    assert (777.0, 9) in found
    assert len(found) <= 2000


def test_a_page_draws_one_whole_step_call_by_call():
    first, second = replace(FORWARD, name="forward_0"), replace(FORWARD, name="backward_0", collectives=())
    update = replace(FORWARD, name="inference_1", collectives=(), changes_inputs=True)
    step = StepRecord(graphs=(first, second, update), calls={"forward_0": 2, "backward_0": 2, "inference_1": 1})
    names = ["forward_0", "backward_0", "forward_0", "backward_0", "inference_1"]
    assert [graph.name for graph in sequence(step)] == names
    after = page_data((step,))["ranks"][0]["data"]["orders"]["after"]
    assert [name for _, name in after["borders"]] == names
    assert after["end"] == 5 * AFTER.step_ns
    assert after["lanes"] == ["compute", "@dp"]
    begins = [begin for lane, _, begin, _, node in after["spans"] if node == "forward_0/mm0"]
    assert begins == [100_000, 100_000 + 2 * AFTER.step_ns]


def test_buffers_at_the_peak_name_their_module_or_line():
    schedule = (
        "schedule forward\n%x = input : 1MiB\n"
        "k0 = kernel(%x) : 2MiB 20us [r]  # k0 | layers.0 | \n"
        "k1 = kernel(k0) : 4MiB 20us [r]  # k1 |  | /home/me/loss.py:59: y = x.float() / 2\nreturn k1\n"
    )
    step = StepRecord(graphs=(replace(FORWARD, schedule=schedule),))
    peak = page_data((step,))["ranks"][0]["data"]["peak"]
    held = {name: (of, size) for name, of, size in peak["held"]}
    assert held["k0"] == ("layers.0", "2MiB")
    assert held["k1"] == ("loss.py:59: y = x.float() / 2", "4MiB")


def test_buffers_of_the_same_module_of_many_layers_are_one_row_at_the_peak():
    names = ("act", "act_1", "act_2")
    lines = [f"{name} = kernel(%x) : 2MiB 20us [r]  # k | layers.{at}.up | " for at, name in enumerate(names)]
    schedule = "\n".join(["schedule forward", "%x = input : 1MiB", *lines, f"return {', '.join(names)}", ""])
    peak = page_data((StepRecord(graphs=(replace(FORWARD, schedule=schedule),)),))["ranks"][0]["data"]["peak"]
    assert peak["held"][0] == ["3 x act", "layers.*.up", "6MiB"]
    assert peak["more"] == 0


def test_gains_are_limited_by_the_lower_bound_and_by_the_queue():
    """ag1 is exposed for 20 us because of memory, but the lower bound is 270 of 280 us; @dp is busy for 200 us."""
    graph = replace(FORWARD, lower_bound_ns=270e3, alone_ns=60e3)
    gains = {gain.why: gain.ns for gain in Ledger.of(StepRecord(graphs=(graph,))).gains}
    assert gains[f"forward: {advice.MEMORY.why}"] == pytest.approx(10e3)
    assert gains[f"forward: {advice.BEGIN.why}"] == pytest.approx(100e3)
    assert gains["communication slows overlapping compute"] == pytest.approx(80e3), "100 us, limited by the time of @dp"


def test_equal_ranks_are_in_a_page_once():
    first = StepRecord(0, 2, (FORWARD,))
    found = page_data((first, replace(first, rank=1)))["ranks"]
    assert [(rank["same"], rank["data"] is None) for rank in found] == [(None, False), (0, True)]


def test_the_parts_of_a_step_add_up_and_gains_are_no_longer_than_it():
    for host_ns in (None, 1e6):
        step = StepRecord(graphs=(replace(FORWARD, host_ns=host_ns, alone_ns=150e3),))
        ledger = Ledger.of(step)
        assert sum(part.ns for part in ledger.parts) == pytest.approx(ledger.step_ns)
        assert all(0 < gain.ns < ledger.step_ns for gain in ledger.gains)
        assert [gain.ns for gain in ledger.gains] == sorted((gain.ns for gain in ledger.gains), reverse=True)
        assert ledger.ceilings[0].ns == ledger.step_ns == max(each.ns for each in ledger.ceilings)
    assert len(ledger.gains) == 1, "savings on the device gain nothing while the host is slower"


def test_a_step_that_was_measured_is_headed_by_its_measurement():
    seen = replace(FORWARD, measured=Measured(3, 300e3, 170e3, 200e3, 100e3, 30e3))
    (first, second, *_), (only, *_) = (
        tiles(step, Ledger.of(step)) for step in (StepRecord(graphs=(each,)) for each in (seen, FORWARD))
    )
    assert first == ("step, measured", "0.300 ms", "exposed 0.100 ms, idle 0.030 ms")
    assert second[:2] == ("step, predicted", "0.280 ms")
    assert only[:2] == ("step", "0.280 ms")


def test_measurements_come_before_predictions_and_give_the_tokens_per_second():
    measured = replace(FORWARD, measured=Measured(3, 300e3, 170e3, 200e3, 100e3, 30e3, late_ns=10e3))
    step = StepRecord(graphs=(measured,), clock_ns=500e3, tokens=2048)
    shown = tiles(step, Ledger.of(step))
    assert [what for what, *_ in shown[:4]] == ["step, by the clock", "step, measured", "step, predicted", "tokens/s"]
    assert shown[3] == ("tokens/s", "4,096,000", "2,048 tokens a step on all ranks")
    assert "by the clock 0.500 ms from one optimizer step to the next; 4,096,000 tokens/s" in totals_text(step)
    planned = StepRecord(graphs=(FORWARD,), tokens=28)
    assert tiles(planned, Ledger.of(planned))[1][:2] == ("tokens/s", "100,000")
    seen, predicted = bars(step, Ledger.of(step))
    assert (seen[0], predicted[0]) == ("measured", "predicted")
    for _, whole_ns, parts in (seen, predicted):
        assert sum(part.ns for part in parts) == pytest.approx(whole_ns)
    assert [part.kind for part in seen[2]] == ["extern", "idle", "gap", "host"]


def test_advice_follows_the_measurement_if_there_is_one():
    """ag0 was predicted to be exposed for 100 us, ag1 for 20 us, and rs0 not at all."""
    hidden = replace(FORWARD.collectives[1], name="rs0", exposed_after_ns=0.0, causes=("HIDDEN",))
    graph = replace(FORWARD, collectives=(*FORWARD.collectives, hidden))
    exposed = {"ag0": 15e3, "ag1": 40e3, "rs0": 35e3}
    seen = Measured(3, 300e3, 170e3, 200e3, 90e3, 40e3, late_ns=25e3, exposed=exposed)
    step = StepRecord(graphs=(replace(graph, measured=seen),), calls={"forward": 2})
    gains = {gain.why: (gain.ns, gain.measured) for gain in Ledger.of(step).gains}
    assert gains == {
        f"forward: {advice.MEMORY.why}": (80e3, True),
        f"forward: {advice.UNFORESEEN.why}": (70e3, True),
        "the device waits for the host's next launch": (50e3, True),
        f"forward: {advice.BEGIN.why}": (30e3, True),
    }
    assert "<small>measured; try: overlapc calibrate --from" in html.render((step,))
    assert "0.240 ms of communication; measured 0.180 ms:" in totals_text(step)
    old = replace(step, graphs=(replace(graph, measured=replace(seen, exposed={})),))  # older records have only the sum
    assert not any(gain.measured for gain in Ledger.of(old).gains)
    assert "measured 0.180" not in totals_text(old).partition("exposed ")[2]


def test_compute_is_divided_by_kind():
    nodes = (
        "mm0 = extern:mm(x) flops=10 in=bf16 : 4KiB 40us [r]",
        "a0 = extern:_scaled_dot_product_cudnn_attention(mm0) flops=9 in=bf16 : 4KiB 30us [r]",
        "k0 = kernel(a0) : 4KiB 20us [r]",
        "s0 = extern:sort(k0) : 4KiB 10us [r]",
    )
    graph = replace(FORWARD, schedule="schedule forward\n" + "\n".join(nodes) + "\n", alone_ns=100e3)
    parts = [(part.name, part.ns) for part in Ledger.of(StepRecord(graphs=(graph,))).parts][:4]
    assert parts == [
        ("matrix products", 40e3),
        ("attention", 30e3),
        ("generated kernels", 20e3),
        ("other library calls", 10e3),
    ]


def test_recomputation_in_backward_is_a_ceiling_and_a_gain():
    forward = (
        "schedule forward_0\nmm0 = extern:mm(%x) : 4KiB 40us [r]  # mm | m | \n"
        "k0 = kernel(mm0) : 4KiB 9us [r]  # relu | m | \n"
    )
    backward = (
        "schedule backward_0\nmm0 = extern:mm(%x) : 4KiB 40us [r]  # mm | m | \n"
        "k1 = kernel(mm0) : 4KiB 9us [r]  # relu mul | m | \nmm1 = extern:mm(k1) : 4KiB 40us [r]  # mm_1 | m | \n"
    )
    graphs = tuple(
        replace(FORWARD, name=name, schedule=text, collectives=())
        for name, text in (("forward_0", forward), ("backward_0", backward))
    )
    ledger = Ledger.of(StepRecord(graphs=graphs, calls={"forward_0": 2, "backward_0": 2}))
    assert ledger.ceilings[-1] == Ceiling("without recomputation", ledger.step_ns - 80e3)
    assert (80e3, "backward recomputes what forward computed") in [(gain.ns, gain.why) for gain in ledger.gains]


def test_utilization_is_relative_to_the_rates_of_the_profile():
    profile = {"name": "p", "quantities": {"flops_per_s.bf16": {"value": 1e12, "origin": "made up"}}}
    schedule = "schedule forward\nmm0 = extern:mm(x) flops=56000000 in=bf16 : 4KiB 80us [r]\n"
    graph = replace(FORWARD, schedule=schedule, profile=json.dumps(profile))
    assert utilization(StepRecord(graphs=(graph,))) == pytest.approx(0.2)  # 56 us of 280
    assert utilization(StepRecord(graphs=(replace(graph, profile=""),))) is None
