"""`overlapc.metrics` returns measured and predicted numbers for a logger, and leaves out what is unknown."""

from __future__ import annotations

import pytest
import torch

import overlapc
from overlapc.report.record import NothingCompiled
from overlapc.runtime import steps
from tests.report.test_one_step import Train, fresh  # noqa: F401 -- the fixture


def test_metrics_of_a_job_are_of_its_typical_step(monkeypatch):
    clock = iter(range(100, 10_000, 2))
    monkeypatch.setattr(steps.time, "perf_counter", lambda: float(next(clock)))
    with pytest.raises(NothingCompiled):
        overlapc.metrics(object())
    job = Train(8)
    job.step(job.rows).sum().backward()
    early = overlapc.metrics(job.step, tokens=64)
    assert early.keys() == {"predicted_ms", "exposed_ms", "bound_ms", "peak_gib", "host_ms"}
    steps.STEPS.ends_s.extend((10.0, 12.0, 14.5, 16.5))  # steps of 2, 2.5 and 2 s
    later = overlapc.metrics(job.step, tokens=64)
    assert (later["step_ms"], later["tokens_per_s"]) == (2000.0, 32.0)
    (step,) = overlapc.report().steps
    assert later["predicted_ms"] == step.step_ns / 1e6
    assert (step.clock_ns, step.tokens) == (2e9, 64)
    assert "by the clock 2000.000 ms from one optimizer step to the next; 32 tokens/s" in str(overlapc.report())
    assert 0 < later["utilization"] < 1e-3


def test_the_time_of_a_step_is_from_optimizer_to_optimizer(monkeypatch):
    watched = steps.Steps()
    times = iter([1.0, 1.5, 3.0, 3.5, 5.0, 5.5, 7.0])
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(times))
    generator, discriminator = (torch.optim.SGD([torch.ones(1, requires_grad=True)]) for _ in range(2))
    for optimizer in (generator, discriminator) * 3:
        watched.counter("forward_0")[0] += 1
        watched.optimizer_stepped(optimizer)
    assert list(watched.ends_s) == [1.5, 3.5]
    assert watched.step_s() == 2.0


def test_after_three_steps_the_time_of_the_first_is_not_part_of_the_median():
    watched = steps.Steps()
    watched.ends_s.extend([0.0, 9.0, 10.0])  # the second step compiled backward for another batch
    assert watched.step_s() == 1.0


def test_tensorboard_accepts_metrics(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    job = Train(8)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        for number in range(4):
            job.train(1)
            for name, value in overlapc.metrics(job.step, tokens=32).items():
                writer.add_scalar(f"overlapc/{name}", value, number)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [each.step for each in events.Scalars("overlapc/predicted_ms")] == [0, 1, 2, 3]
    assert events.Scalars("overlapc/tokens_per_s")[-1].value > 0
