"""A report describes one training step, however often its graphs are called in it and whatever else the process ran."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import overlapc
from overlapc.report import record
from overlapc.report.captures import captures_lines
from overlapc.report.limiting_factor import Spent, sources
from overlapc.report.model import Capture, StepRecord
from overlapc.report.text import totals_text
from overlapc.runtime.steps import STEPS
from tests.report.sample import BACKWARD, FORWARD

OPTIONS = {"profile": "h200-nvlink"}


class Train:
    """A compiled model and its optimizer."""

    def __init__(self, width: int) -> None:
        self.model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        self.step = torch.compile(self.model, backend="overlapc", options=OPTIONS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rows = torch.ones(4, width)

    def train(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self.step(self.rows).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.step(self.rows)
        self.model.train()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    record.clear()
    yield
    record.clear()


def called() -> dict[str, int]:
    """Return the number of calls by kind of graph; graph numbers depend on what ran before."""
    return {graph.name.split("_")[0]: times for graph, times in overlapc.report().steps[0].called}


def test_micro_batches_count_as_often_as_they_run_and_evaluation_does_not():
    job = Train(8)
    for _ in range(3):
        job.train(2)
        job.evaluate()
    (step,) = overlapc.report().steps
    assert called() == {"forward": 2, "backward": 2}
    forward, backward, inference = step.graphs
    assert step.device_ns == pytest.approx(2 * (forward.after.step_ns + backward.after.step_ns))
    assert step.left_out == (inference,)
    line = next(line for line in str(overlapc.report()).splitlines() if line.startswith("one step"))
    assert line == f"one step     2 x {forward.name}, 2 x {backward.name}; not part of it: {inference.name}"


def test_the_state_of_an_optimizer_counts_when_the_function_that_made_it_has_ended():
    def main() -> None:
        job = Train(8)
        job.optimizer = torch.optim.AdamW(job.model.parameters())
        job.train(1)

    main()
    assert overlapc.report().steps[0].optimizer_bytes["AdamW"] == pytest.approx(2 * 4 * (8 * 8 + 8 + 8 + 1), abs=16)


def test_of_two_consecutive_trainers_the_step_has_the_graphs_of_one():
    for width in (8, 16):
        job = Train(width)
        for _ in range(3 if width == 8 else 5):
            job.train(1)
    (step,) = overlapc.report().steps
    first, second = step.graphs[:2], step.graphs[2:]
    assert tuple(graph for graph, _ in step.called) == second
    assert step.left_out == first


def test_two_optimizers_that_take_turns_share_a_step():
    generator, discriminator = Train(8), Train(16)
    for _ in range(3):
        generator.train(1)
        discriminator.train(2)
    assert [times for _, times in overlapc.report().steps[0].called] == [1, 1, 2, 2]


def test_before_an_optimizer_steps_each_graph_counts_once():
    job = Train(8)
    for _ in range(3):
        job.step(job.rows).sum().backward()
    assert called() == {"forward": 1, "backward": 1}


def test_a_job_that_only_infers_is_reported_by_what_it_infers():
    Train(8).evaluate()
    assert called() == {"inference": 1}


def test_a_compiled_optimizer_is_part_of_the_step_and_ends_it():
    job = Train(8)
    update = torch.compile(job.optimizer.step, backend="overlapc", options=OPTIONS)
    for _ in range(4):
        for _ in range(2):
            job.step(job.rows).sum().backward()
        update()
        job.optimizer.zero_grad()
    assert called() == {"forward": 2, "backward": 2, "inference": 1}
    assert STEPS.stepped == 4
    assert overlapc.metrics(job.step, tokens=64)["tokens_per_s"] > 0


def test_what_changes_inputs_beside_an_optimizer_ends_no_step():
    job = Train(8)
    average = torch.zeros(4, 1)
    follow = torch.compile(lambda value: average.lerp_(value, 0.1), backend="overlapc", options=OPTIONS)
    for _ in range(4):
        for _ in range(2):
            loss = job.step(job.rows)
            loss.sum().backward()
            follow(loss.detach())
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert called() == {"forward": 2, "backward": 2, "inference": 2}


def test_every_figure_of_a_step_counts_its_calls():
    once = StepRecord(graphs=(FORWARD, BACKWARD))
    twice = replace(once, calls={"forward": 2, "backward": 2})
    for figure in ("step_ns", "step_before_ns", "lower_bound_ns", "device_ns"):
        assert getattr(twice, figure) == 2 * getattr(once, figure)
    spent, expected = Spent.of(twice), Spent.of(once)
    assert (spent.compute_ns, spent.exposed_ns) == (2 * expected.compute_ns, 2 * expected.exposed_ns)
    assert spent.queues_ns == {"@dp": 2 * expected.queues_ns["@dp"]}
    assert sources(twice) == sources(once)
    assert "exposed      0.400 ms -> 0.240 ms of communication" in totals_text(twice)
    assert "  0.200 ms  a collective of forward (ag0)" in totals_text(twice)
    assert "kernels      4 generated; eager fallbacks: 6" in totals_text(twice)


class Pieces(nn.Module):
    """A model with a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x).sum()


def test_graph_breaks_and_variants_are_named_with_line_and_reason():
    step = torch.compile(Pieces(), backend="overlapc", options=OPTIONS)
    for rows in (4, 5):
        step(torch.ones(rows, 8)).backward()
    lines = str(overlapc.report()).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("pieces"))
    assert lines[at] == "pieces       2: no node is scheduled across their boundaries"
    line = Pieces.forward.__code__.co_firstlineno + 2
    assert lines[at + 1] == (
        f"  broken at {__file__}:{line} `torch._dynamo.graph_break()`, 2 times: Call to `torch._dynamo.graph_break()`"
    )
    variants = [line for line in lines if line.startswith("variants")]
    assert [each.split(" (")[0] for each in variants] == [
        "variants     2 of forward",
        f"variants     2 of forward from line {line}",
    ]
    again = lines[lines.index(variants[0]) + 2]
    assert again.startswith("  forward_")
    assert "size mismatch at index 0. expected 4, actual 5" in again
    assert "stack trace" not in again
    assert ": because 0/" not in again


@pytest.mark.parametrize(
    ("guard", "why"),
    [
        (
            "0/0: KeyError on self._modules['up']._overlapc_unsynced['weight']",
            "gradients are reduced in one variant and not",
        ),
        ("0/0: self._modules['up']._overlapc_forms['weight'] == '0123'", "gathered or reduced in another way"),
    ],
)
def test_guards_on_internal_attributes_of_sharded_modules_are_explained(guard, why):
    file = "/a/overlapc/parallel/access.py:57"
    captures = (Capture(0, "0", "__call__", file), Capture(1, "0", "__call__", file, guard))
    step = StepRecord(
        graphs=(replace(FORWARD, name="forward_0"), replace(FORWARD, name="forward_1")), captures=captures
    )
    title, _, second = captures_lines(step)
    assert title == "variants     2 of the sharded model"
    assert why in second
    assert "_overlapc" not in second


def test_compile_time_is_reported_by_phase_and_counted_once():
    began = time.perf_counter()
    Train(8).train(1)
    whole = time.perf_counter() - began
    seconds = overlapc.report().steps[0].seconds
    assert next(iter(seconds)) == "Dynamo"
    ours = {"partition", "graph", "lowering", "fusion", "estimates", "passes", "code", "kernels"}
    assert {"AOTAutograd", *ours} <= seconds.keys()
    assert all(each > 0 for each in seconds.values())
    assert sum(seconds.values()) < whole
    assert any(line.startswith("compiling    ") for line in str(overlapc.report()).splitlines())


def test_graph_breaks_survive_saving(tmp_path):
    step = torch.compile(Pieces(), backend="overlapc", options=OPTIONS)
    step(torch.ones(4, 8)).backward()
    report = overlapc.report()
    assert len(report.steps[0].breaks) == 1
    assert record.load(report.save(tmp_path / "record.json")) == report
