"""Measures collectives by copies for `overlapc calibrate`: their times, and their contention with compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlapc.config import Config
from overlapc.estimators.calibration.clock import collective_ns
from overlapc.estimators.calibration.measure_contention import ContentionMeasurement
from overlapc.estimators.calibration.measure_machine import Measurement
from overlapc.estimators.calibration.workloads import agreed, calls_for
from overlapc.runtime.copies.command_queues import unsupported
from overlapc.runtime.copies.commands import aligned
from overlapc.runtime.copies.layout import Release, Start, Take, place
from overlapc.runtime.copies.pool import Form, GraphCopies, Pool, Wanted, open_pools
from overlapc.schedule.collective_kinds import COPY

_FORMS = {"all_gather": Form.GATHERED, "all_to_all": Form.FROM_OTHERS}
_NAME = "all ranks"


class InFlight:
    """A running collective by copies, with the interface of `dist.Work` that measurements need."""

    def __init__(self, pool: Pool, done: Any) -> None:
        self._pool, self._done = pool, done

    def wait(self) -> None:
        """Wait for the collective like `dist.Work.wait`."""
        self._pool.queue.wait(self._done)


def copies(measurement: Measurement) -> None:
    """Measure times, and on GPUs slowdowns, of copies between all ranks. Collective: every rank must call it."""
    reason = unsupported(measurement.device, Config.of({}).cache_dir)
    if reason:
        measurement.say(f"no copies: {reason}")
        return
    effort, clock, device = measurement.effort, measurement.clock, measurement.device
    largest = max([*effort.collective_bytes, effort.beside_bytes if clock.queued else 0])
    keeps = _opened(largest, device)  # opened once for the largest size: otherwise each larger one opens new memory
    slowdowns = measurement.quantities.setdefault("slowdowns", {})
    for collective, form in _FORMS.items():
        measurement.say(f"{collective} by copies on {dist.get_world_size()} ranks")
        points = []
        for size in effort.collective_bytes:
            launch = launcher(form, size, device)
            points.append([size, collective_ns(clock, launch, calls_for(size, clock))])
        name = f"{collective} via {COPY}"
        measurement.tables.append({"collective": name, "ranks": dist.get_world_size(), "dtype": "", "points": points})
        if clock.queued:
            measurement.say(f"{collective} by copies overlapped with compute")
            size = effort.beside_bytes
            launch = launcher(form, size, device)
            alone_ns = agreed(collective_ns(clock, launch, calls_for(size, clock)), device)
            contention = ContentionMeasurement(
                effort, device, clock, measurement.load, measurement.say, facts=measurement.facts
            )
            slowdowns[name] = contention.of_copies(launch, alone_ns)
    keeps.queue.drain()


def launcher(form: Form, size_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that starts one all-gather or exchange of `size_bytes`, always on the same memory.

    As in a training step, nothing is copied within a GPU: a shard is in the pool already when its gather starts, and a
    rank reads its own part of an exchange in place. A copy within a GPU would take most of its memory bandwidth.
    """
    ranks = dist.get_world_size()
    whole = max(1, size_bytes // ranks) * ranks
    exchanged = torch.zeros(whole, dtype=torch.uint8, device=device) if form is not Form.GATHERED else None
    layout = place([Take(0, aligned(whole)), Start((0,)), Release(0)])
    run = GraphCopies(_opened(layout.bytes, device), layout, [form])

    def launch() -> InFlight:
        given = run.shard(0, 0, (whole // ranks,), (1,), torch.uint8) if exchanged is None else exchanged
        run.start(0, [given])
        return InFlight(run.pool, run.finish(0))

    return launch


def _opened(size_bytes: int, device: torch.device) -> Pool:
    group = dist.group.WORLD
    assert group is not None
    ranks = tuple(range(dist.get_world_size()))
    wanted = Wanted(group.group_name, _NAME, ranks, size_bytes + 2 * aligned(1), "")
    return open_pools([wanted], device, ranks, _tell, Config.of({}).cache_dir)[_NAME]


def _tell(stage: str, text: str) -> Sequence[str]:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, json.dumps([stage, text]))
    messages = [json.loads(each) for each in texts]
    assert all(message[0] == stage for message in messages), "ranks are at different points"
    return [text for _, text in messages]
