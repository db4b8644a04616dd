"""Measures one rank's device and its links to other ranks; the same code for GPUs and CPUs.

All ranks must call these functions in the same order with the same sizes: the number of collectives never depends on
measurements of a single rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlapc.estimators.calibration.clock import Clock, clock_for, collective_ns, compute_ns, launch_ns
from overlapc.estimators.calibration.effort import AttentionShape, Effort
from overlapc.estimators.calibration.measure_contention import ContentionMeasurement
from overlapc.estimators.calibration.measure_load import LoadMeasurement
from overlapc.estimators.calibration.profiled_contention import kernel_ns
from overlapc.estimators.calibration.workloads import (
    DTYPES,
    agreed,
    attend,
    attention_inputs,
    calls_for,
    gathers_together,
    launcher,
    operands,
    random,
)

_SMALL_TENSORS = 33  # tensors of a coalesced collective
_GAP_CHAIN, _GAP_ROUNDS = 50, 5  # length of a chain of kernels, each followed by a collective; number of samples


class Measurement:
    """The measurements of one rank. Results are plain data: quantities, curves, tables and facts."""

    def __init__(self, device: torch.device, effort: Effort, say: Callable[[str], None] = lambda _: None) -> None:
        self.device, self.effort, self.say = device, effort, say
        self.clock: Clock = clock_for(device)
        self.quantities: dict[str, Any] = {}
        self.curves: dict[str, list[list[float]]] = {}
        self.tables: list[dict[str, Any]] = []
        self.facts: dict[str, float] = {}
        self.load: Callable[[], None] | None = None  # launches work that runs before measured compute

    def compute(self) -> None:
        """Measure copies, matmuls, attention, the shortest kernel and the host's launch time, without communication."""
        effort, values = self.effort, self.quantities
        self.say("copies")
        values["memory_bytes_per_s"] = self.copy_rate(effort.copy_bytes)
        self.warm_up()
        if self.load is not None:
            values.update(LoadMeasurement(effort, self.device, self.clock, self.load, self.say).measured())
        for dtype, shapes in effort.matmuls.items():
            self.say(f"matmuls, {dtype}")
            points = [self.matmul_rate(shape, DTYPES[dtype]) for shape in shapes]
            self._curve(f"matmul.{dtype}", points)
            values[f"flops_per_s.{dtype}"] = max(rate for _, rate in points)
        for dtype, cases in effort.attention.items():
            self.say(f"attention, {dtype}")
            times = [(case.flops, *self._attention(case, DTYPES[dtype])) for case in cases]
            self._curve(f"attention.{dtype}", [(flops, flops / ns * 1e9) for flops, ns, _ in times])
            self._curve(
                f"attention_backward.{dtype}", [(flops * 5 // 2, 2.5 * flops / ns * 1e9) for flops, _, ns in times]
            )
        small = random(self.device, 16, dtype=torch.float32)
        if self.device.type != "cpu":
            values["kernel_floor_ns"] = kernel_ns(lambda: small.add_(1.0), calls=100)
        values["launch_ns"] = launch_ns(self.clock, lambda: small.add_(1.0))

    def warm_up(self) -> None:
        """Set `load`, the work that runs before measured compute."""
        self.load = self._load()

    def communication(self) -> None:
        """Measure collectives over all ranks and, if there are more than two, over pairs of neighbouring ranks."""
        world = dist.get_world_size()
        assert dist.group.WORLD is not None
        self._collectives(dist.group.WORLD)
        if world > 2 and world % 2 == 0:
            pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
            self._collectives(pairs[dist.get_rank() // 2])
        self.say("coalesced collectives")
        self._coalesced(dist.group.WORLD)
        if self.clock.queued:
            self._gap(dist.group.WORLD)

    def contention(self) -> None:
        """Measure contention between compute and collectives over all ranks, including the power of collectives."""
        found = ContentionMeasurement(self.effort, self.device, self.clock, self.load, self.say)
        found.measure()
        self.quantities.update(found.quantities)
        self.facts.update(found.facts)
        if self.load is not None:
            self.say("a layer with collectives in its pauses")
            assert dist.group.WORLD is not None
            launches = [
                launcher(collective, dist.group.WORLD, self.effort.pause_collective_bytes, DTYPES[dtype], self.device)
                for collective, dtype in (("all_gather", "bf16"), ("reduce_scatter", "fp32"))
            ]
            values, load = self.quantities, LoadMeasurement(self.effort, self.device, self.clock, self.load, self.say)
            values["collective_load"] = load.collective_load(
                values["throttle"], values["clock_by_utilization"], launches
            )

    def matmul_rate(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[int, float]:
        """Return the FLOPs and FLOP/s of a product of shape (rows, inner, columns), after `load` if there is one."""
        a, b = operands(self.device, shape, dtype)
        flops = 2 * math.prod(shape)
        return flops, flops / compute_ns(self.clock, lambda: torch.mm(a, b), self._rounds, ahead=self.load) * 1e9

    def copy_rate(self, size_bytes: int) -> float:
        """Return the bytes read and written per second by a copy of `size_bytes`."""
        source = random(self.device, size_bytes // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        return 2 * source.nbytes / compute_ns(self.clock, lambda: target.copy_(source)) * 1e9

    def result(self) -> dict[str, Any]:
        """Return all results as JSON data, with the same structure on every rank."""
        return {
            "quantities": self.quantities,
            "curves": self.curves,
            "tables": self.tables,
            "facts": self.facts,
        }

    # --- compute

    @property
    def _rounds(self) -> int:
        """Number of samples of a measurement: one after `load`, which makes a sample long, else three."""
        return 3 if self.load is None else 1

    def _load(self) -> Callable[[], None] | None:
        """Return a function that launches matmuls for `load_s`; None for a device that load does not slow down."""
        if self.effort.load_s <= 0:
            return None
        a, b = operands(self.device, self.effort.beside_matmul, torch.bfloat16)
        product = torch.mm(a, b)
        calls = max(1, round(self.effort.load_s * 1e9 / compute_ns(self.clock, lambda: torch.mm(a, b, out=product))))

        def launch() -> None:
            for _ in range(calls):
                torch.mm(a, b, out=product)

        return launch

    def _attention(self, case: AttentionShape, dtype: torch.dtype) -> tuple[float, float]:
        """Return the ns of forward and of backward."""
        query, key, value = (each.requires_grad_() for each in attention_inputs(self.device, case, dtype))
        with torch.no_grad():
            forward_ns = compute_ns(self.clock, lambda: attend(query, key, value), self._rounds, ahead=self.load)
        out = attend(query, key, value)
        grad = torch.randn_like(out)
        backward_ns = compute_ns(
            self.clock,
            lambda: torch.autograd.grad(out, (query, key, value), grad, retain_graph=True),
            self._rounds,
            ahead=self.load,
        )
        return forward_ns, backward_ns

    def _curve(self, name: str, points: Sequence[tuple[int, float]]) -> None:
        """Add a curve with one point for each size, the median over shapes of that size; a single size is no curve."""
        rates: dict[int, list[float]] = {}
        for size, rate in points:
            rates.setdefault(size, []).append(rate)
        if len(rates) > 1:
            self.curves[name] = [[size, _median(rates[size])] for size in sorted(rates)]

    # --- communication

    def _collectives(self, group: dist.ProcessGroup) -> None:
        for collective in self.effort.collectives:
            self.say(f"{collective} on {group.size()} ranks")
            for dtype in self.effort.collective_dtypes:
                points = []
                for size in self.effort.collective_bytes:
                    launch = launcher(collective, group, size, DTYPES[dtype], self.device)
                    points.append([size, collective_ns(self.clock, launch, calls_for(size, self.clock))])
                launch = launcher(collective, group, self.effort.collective_bytes[0], DTYPES[dtype], self.device)
                isolated_ns = collective_ns(self.clock, launch, 1, rounds=9)
                self.facts[f"{collective} {dtype} alone, {points[0][0]} B on {group.size()} ranks, ns"] = isolated_ns
                self.tables.append({"collective": collective, "ranks": group.size(), "dtype": dtype, "points": points})

    def _gap(self, group: dist.ProcessGroup) -> None:
        """Measure the gap from a kernel to the next collective and back: the time of a chain minus its parts' times."""
        size = self.effort.collective_bytes[0]
        launch = launcher("all_gather", group, size, DTYPES[self.effort.collective_dtypes[0]], self.device)
        small = random(self.device, 16, dtype=torch.float32)

        def chain() -> None:
            small.add_(1.0)
            launch().wait()

        alone_ns = agreed(collective_ns(self.clock, launch, calls_for(size, self.clock)), self.device)
        kernel_ns = compute_ns(self.clock, lambda: small.add_(1.0))
        chain()
        self.clock.sync()
        samples = []
        for _ in range(_GAP_ROUNDS):
            self.clock.hold(_GAP_CHAIN * 2e-4)
            begin = self.clock.mark()
            for _ in range(_GAP_CHAIN):
                chain()
            end = self.clock.mark()
            self.clock.sync()
            samples.append(self.clock.between_ns(begin, end) / _GAP_CHAIN)
        self.quantities["collective_gap_ns"] = max(0.0, agreed(_median(samples), self.device) - alone_ns - kernel_ns)

    def _coalesced(self, group: dist.ProcessGroup) -> None:
        """Measure the time that each further tensor adds to a coalesced all-gather; large tensors would hide it.

        On 4 H200s the nine tensors of a Llama-8B layer, coalesced, took as long as one tensor of their total size.
        """
        if not self.effort.layer:
            return
        dtype = DTYPES[self.effort.collective_dtypes[0]]
        small = [self.effort.layer[0]] * _SMALL_TENSORS
        together_ns, flat_ns = self._side_by_side(group, small, dtype)
        self.quantities["coalesced_tensor_ns"] = max(0.0, (together_ns - flat_ns) / (len(small) - 1))
        self._side_by_side(group, self.effort.layer, dtype)

    def _side_by_side(
        self, group: dist.ProcessGroup, elements: Sequence[int], dtype: torch.dtype
    ) -> tuple[float, float]:
        """Return the ns of a coalesced all-gather of tensors with `elements`, and of one tensor of the same bytes."""
        ranks = group.size()
        shards = [torch.zeros(math.ceil(count / ranks), dtype=dtype, device=self.device) for count in elements]
        wholes = [torch.zeros(shard.numel() * ranks, dtype=dtype, device=self.device) for shard in shards]
        size = sum(whole.nbytes for whole in wholes)
        calls = calls_for(size, self.clock)
        together = gathers_together(group, wholes, shards, self.device)
        flat = launcher("all_gather", group, size, dtype, self.device)
        together_ns = agreed(collective_ns(self.clock, together, calls), self.device)
        flat_ns = agreed(collective_ns(self.clock, flat, calls), self.device)
        self.facts[f"all_gather of {len(shards)} tensors, {size} B, coalesced, ns"] = together_ns
        self.facts[f"all_gather of one tensor, {size} B, ns"] = flat_ns
        return together_ns, flat_ns


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
