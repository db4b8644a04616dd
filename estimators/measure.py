"""What one rank measures of its device and of its connection to other ranks; the same code on a GPU and a CPU.

All ranks must call these functions in the same order with the same sizes: how many collectives run never depends on
what a single rank measured.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from overlapc.errors import OverlapcError
from overlapc.estimators.beside import company, held_multiprocessors, kernel_ns
from overlapc.estimators.clock import (
    Clock,
    Launch,
    beside_ns,
    burst_ns,
    cache_bytes,
    clock_for,
    collective_ns,
    compute_ns,
    launch_ns,
)
from overlapc.estimators.contention import tiles_of, waves

MIB = 2**20
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LLAMA_LAYER = (4096, 16 * MIB, 4 * MIB, 4 * MIB, 16 * MIB, 4096, 56 * MIB, 56 * MIB, 56 * MIB)  # elements, 8B shape
_SMALL_TENSORS = 33  # of a coalesced collective
_GAP_CHAIN, _GAP_ROUNDS = 50, 5  # kernels with a collective behind each


@dataclass(frozen=True)
class Attention:
    """Causal attention of `heads` queries that share `kv_heads` keys and values."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    width: int

    @property
    def flops(self) -> int:
        """Of the forward, as the estimators count: causal attention like any other."""
        return 4 * self.batch * self.heads * self.seq * self.seq * self.width


@dataclass(frozen=True)
class Effort:
    """Which sizes to measure."""

    matmuls: Mapping[str, Sequence[tuple[int, int, int]]]  # dtype -> (rows, inner, columns)
    copy_bytes: int
    collectives: Sequence[str]
    collective_bytes: Sequence[int]
    collective_dtypes: Sequence[str]
    beside_bytes: int  # of collectives, and of copies, that run beside something
    beside_matmul: tuple[int, int, int]
    attention: Mapping[str, Sequence[Attention]] = field(default_factory=dict)
    # On a GPU contention depends on how a matmul's tiles fill the device: shapes of one wave, of few and of many.
    beside_matmuls: Sequence[tuple[int, int, int]] = ()
    beside_moved: Sequence[int] = ()  # bytes that memory-bound kernels read and write
    beside_attention: Attention | None = None
    channels: Sequence[int] = ()  # process groups of so many channels are measured too
    layer: Sequence[int] = ()  # elements of the tensors that a coalesced collective moves
    generated_bytes: Sequence[int] = ()  # read and written by a generated kernel
    # Of matmuls right before each matmul and attention that is measured: in short bursts an H200 reached 814 TFLOP/s,
    # under the load of a training step 740, back to back 712.
    load_s: float = 0.0
    burst_matmuls: Sequence[tuple[int, int, int]] = ()  # measured in short bursts, too, in bf16

    @classmethod
    def quick(cls) -> Effort:
        """About ten seconds on two cores: what is measured when a machine's CPU is first compiled for."""
        return cls(
            matmuls={"fp32": [(512, 512, 512)], "bf16": [(512, 512, 512)]},
            copy_bytes=32 * MIB,
            collectives=("all_gather", "reduce_scatter", "all_reduce"),
            collective_bytes=[2**16, 2**18, MIB, 4 * MIB, 16 * MIB],
            collective_dtypes=("fp32",),
            beside_bytes=16 * MIB,
            beside_matmul=(256, 256, 256),
        )

    @classmethod
    def cpu(cls) -> Effort:
        """What `overlapc calibrate` measures on a CPU."""
        squares = [(size, size, size) for size in (64, 128, 256, 512, 1024)]
        return cls(
            matmuls={"fp32": squares, "bf16": squares},
            attention={"fp32": [Attention(1, 4, 2, seq, 64) for seq in (128, 512)]},
            copy_bytes=32 * MIB,
            collectives=COLLECTIVES,
            collective_bytes=[2**16, 2**18, MIB, 4 * MIB, 16 * MIB],
            collective_dtypes=("fp32",),
            beside_bytes=16 * MIB,
            beside_matmul=(256, 256, 256),
            layer=[size // 64 for size in _LLAMA_LAYER],
            generated_bytes=[2**16, MIB, 16 * MIB],
        )

    @classmethod
    def gpu(cls) -> Effort:
        """What `overlapc calibrate` measures on a GPU: sizes of transformers from small to Llama-8B and above."""
        bf16 = [(size, size, size) for size in (256, 512, 1024, 2048)]
        for rows in (1024, 4096):
            bf16 += [(rows, 4096, 1024), (rows, 4096, 4096), (rows, 4096, 14336), (rows, 14336, 4096)]
        bf16 += [(4096, 4096, 32000), (8192, 4096, 14336)]
        return cls(
            matmuls={"bf16": bf16, "fp32": [(size, size, size) for size in (512, 1024, 2048, 4096)]},
            attention={"bf16": [Attention(1, 32, 8, seq, 128) for seq in (512, 1024, 2048, 4096, 8192)]},
            copy_bytes=1024 * MIB,
            collectives=COLLECTIVES,
            collective_bytes=[2**power for power in range(16, 31, 2)],
            collective_dtypes=("bf16", "fp32"),
            beside_bytes=512 * MIB,
            beside_matmul=(8192, 4096, 14336),
            beside_matmuls=[(4096, 4096, columns) for columns in (1024, 2048, 4096, 7168, 14336, 32768)],
            beside_moved=[8 * MIB, 32 * MIB, 96 * MIB, 512 * MIB],
            beside_attention=Attention(1, 32, 8, 4096, 128),
            channels=(16, 8, 4),
            layer=_LLAMA_LAYER,
            generated_bytes=[2**power for power in range(18, 31, 3)],
            load_s=0.25,
            burst_matmuls=[(4096, 4096, columns) for columns in (512, 1024, 4096, 14336, 32000)],
        )


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class Measurement:
    """Everything that one rank measures. Results are plain data: quantities, curves, tables and facts."""

    def __init__(self, device: torch.device, effort: Effort, say: Callable[[str], None] = lambda _: None) -> None:
        self.device, self.effort, self.say = device, effort, say
        self.clock: Clock = clock_for(device)
        self.quantities: dict[str, Any] = {}
        self.curves: dict[str, list[list[float]]] = {}
        self.tables: list[dict[str, Any]] = []
        self.facts: dict[str, float] = {}
        self.load: Callable[[], None] | None = None  # what runs before compute that is measured

    def compute(self) -> None:
        """Copies, matmuls, attention, the shortest kernel and the host's time for a launch. No communication."""
        effort, values = self.effort, self.quantities
        self.say("copies")
        values["memory_bytes_per_s"] = self._copy_rate(effort.copy_bytes)
        if effort.load_s > 0:
            self.say("matmuls and attention in bursts")
            bursts = self._bursts()
        self.load = self._load()
        for dtype, shapes in effort.matmuls.items():
            self.say(f"matmuls, {dtype}")
            points = [self._matmul(shape, DTYPES[dtype]) for shape in shapes]
            self._curve(f"matmul.{dtype}", points)
            values[f"flops_per_s.{dtype}"] = max(rate for _, rate in points)
        for dtype, cases in effort.attention.items():
            self.say(f"attention, {dtype}")
            times = [(case.flops, *self._attention(case, DTYPES[dtype])) for case in cases]
            self._curve(f"attention.{dtype}", [(flops, flops / ns * 1e9) for flops, ns, _ in times])
            self._curve(
                f"attention_backward.{dtype}", [(flops * 5 // 2, 2.5 * flops / ns * 1e9) for flops, _, ns in times]
            )
        if effort.load_s > 0:
            self._throttle(bursts)
        small = self._random(16, dtype=torch.float32)
        if self.device.type != "cpu":
            values["kernel_floor_ns"] = kernel_ns(lambda: small.add_(1.0), calls=100)
            values["kernel_gap_ns"] = max(
                0.0, compute_ns(self.clock, lambda: small.add_(1.0)) - values["kernel_floor_ns"]
            )
        values["launch_ns"] = launch_ns(self.clock, lambda: small.add_(1.0))

    def _bursts(self) -> dict[str, list[tuple[int, float]]]:
        """(FLOPs, ns) of matmuls and of attention while the device is cool."""
        found: dict[str, list[tuple[int, float]]] = {"matmul": [], "attention": []}
        for shape in self.effort.burst_matmuls:
            a, b = self._operands(shape, torch.bfloat16)
            found["matmul"].append((2 * math.prod(shape), burst_ns(self.clock, partial(torch.mm, a, b))))
        for case in self.effort.attention.get("bf16", ()):
            with torch.no_grad():
                call = partial(_attend, *self._attention_inputs(case, torch.bfloat16))
                found["attention"].append((case.flops, burst_ns(self.clock, call)))
        return found

    def _throttle(self, bursts: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """How many times as long the same takes under load."""
        calls: dict[str, list[Callable[[], object]]] = {"matmul": [], "attention": []}
        for shape in self.effort.burst_matmuls:
            calls["matmul"].append(partial(torch.mm, *self._operands(shape, torch.bfloat16)))
        for case in self.effort.attention.get("bf16", ()):
            calls["attention"].append(partial(_attend, *self._attention_inputs(case, torch.bfloat16)))
        throttle = {}
        for kind, cool in bursts.items():
            with torch.no_grad():
                hot = [compute_ns(self.clock, call, rounds=1, ahead=self.load) for call in calls[kind]]
            points = [[flops, max(1.0, ns / cool_ns)] for (flops, cool_ns), ns in zip(cool, hot, strict=True)]
            if points:
                throttle[kind] = sorted(points)
        if throttle:
            self.quantities["throttle"] = throttle

    def communication(self) -> None:
        """Collectives of the whole world, and of pairs of neighbours when there are more ranks than two."""
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
        """How much compute and collectives of the whole world slow each other."""
        if self.clock.queued:
            self._contention_by_kernel()
        else:
            self._contention_by_clock()

    def _contention_by_kernel(self) -> None:
        """On default channels, and on fewer; see beside.py."""
        assert dist.group.WORLD is not None
        slowdowns: dict[str, dict[str, Any]] = {}
        ordinary: dict[str, float] = {}
        size = self.effort.beside_bytes
        for channels in (0, *self.effort.channels):
            group = dist.group.WORLD if not channels else self._group_on(channels)
            for collective, dtype in (("all_gather", "bf16"), ("reduce_scatter", "fp32")):
                launch = launcher(collective, group, size, DTYPES[dtype], self.device)
                alone_ns = self._agreed(collective_ns(self.clock, launch, calls_for(size, self.clock)))
                self.say(f"{collective} beside compute, {channels or 'default'} channels")
                found = self._company(launch, alone_ns)
                if channels:
                    slowdowns[f"{collective}@{channels}"] = {**found, "alone": alone_ns / ordinary[collective]}
                else:
                    ordinary[collective], slowdowns[collective] = alone_ns, found
        both = [slowdowns[collective] for collective in ordinary]
        slowdowns["other"] = mean_of(both)
        self.quantities["slowdowns"] = slowdowns
        self.quantities["collective_slowdown"] = slowdowns["other"]["own_matmul"]
        self.quantities["multiprocessors"] = self._multiprocessors()

    def _multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _group_on(self, channels: int) -> dist.ProcessGroup:
        """The whole world on at most so many channels."""
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = channels
        group = dist.new_group(backend="nccl", pg_options=options)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _company(self, launch: Launch, alone_ns: float) -> dict[str, Any]:
        """A `Slowdown` of this collective. OverlapcError when something never ran beside it."""
        effort = self.effort
        calls: dict[str, Callable[[], object]] = {}
        for rows, inner, columns in effort.beside_matmuls:
            calls[f"matmul {rows, inner, columns}"] = partial(
                torch.mm, *self._operands((rows, inner, columns), torch.bfloat16)
            )
            grad, x = (self._random(inner, size, dtype=torch.bfloat16) for size in (rows, columns))
            calls[f"gradient {rows, inner, columns}"] = partial(torch.mm, grad.t(), x)
        for size in effort.beside_moved:
            calls[f"memory {size}"] = self._streaming(size)
        if effort.beside_attention is not None:
            inputs = self._attention_inputs(effort.beside_attention, torch.bfloat16)
            calls["attention"] = partial(_attend, *inputs)
        with torch.no_grad():
            calls_ns = {name: self._agreed(compute_ns(self.clock, call, rounds=1)) for name, call in calls.items()}
            met = company(calls, calls_ns, launch, alone_ns, self.load)
        for name, each in met.items():
            self.facts[f"{name} beside a collective of {alone_ns / 1e3:.0f} us"] = each.compute or 0.0
        apart = [name for name, each in met.items() if each.compute is None]
        if apart:
            raise OverlapcError(
                f"no collective of {alone_ns / 1e3:.0f} us ran all the time beside {', '.join(apart)} "
                f"on rank {dist.get_rank()}: ranks are out of step\n"
                "hint: stop what else runs on these GPUs, then calibrate again"
            )
        slowed = {name: max(1.0, each.compute or 1.0) for name, each in met.items()}
        stretched = {name: max(1.0, each.collective or 1.0) for name, each in met.items()}
        return self._slowdown(slowed, stretched)

    def _streaming(self, size_bytes: int) -> Callable[[], object]:
        """Adds that read and write so many bytes of memory, not of the cache, as generated kernels are measured."""
        sets = 2 + 2 * cache_bytes(self.device) // size_bytes
        sources = [self._random(size_bytes // 8, dtype=torch.float32) for _ in range(sets)]
        pairs = itertools.cycle([(source, torch.empty_like(source)) for source in sources])

        def add() -> object:
            source, target = next(pairs)
            return torch.add(source, 1.0, out=target)

        return add

    def _slowdown(self, slowed: Mapping[str, float], stretched: Mapping[str, float]) -> dict[str, Any]:
        """From how many times as long each call, and the collective beside it, took."""
        effort, multiprocessors = self.effort, self._multiprocessors()
        tiles = {shape: tiles_of(shape[0] * shape[2]) for shape in effort.beside_matmuls}
        matmuls = {shape: (slowed[f"matmul {shape}"] + slowed[f"gradient {shape}"]) / 2 for shape in tiles}
        largest, most = effort.beside_matmuls[-1], effort.beside_moved[-1]
        return {
            "matmul": matmuls[largest],
            "own_matmul": statistics.median(
                stretched[f"{kind} {shape}"] for shape in tiles for kind in ("matmul", "gradient")
            ),
            "matmuls": [[waves(tiles[shape], multiprocessors), times] for shape, times in matmuls.items()],
            "multiprocessors": float(
                held_multiprocessors([(tiles[shape], times) for shape, times in matmuls.items()], multiprocessors)
            ),
            "memory": slowed[f"memory {most}"],
            "own_memory": stretched[f"memory {most}"],
            "memories": [[size, slowed[f"memory {size}"]] for size in effort.beside_moved],
            **({"attention": slowed["attention"]} if effort.beside_attention is not None else {}),
        }

    def _contention_by_clock(self) -> None:
        """On a CPU, where nothing waits for a kernel's last wave."""
        effort, clock, device = self.effort, self.clock, self.device
        assert dist.group.WORLD is not None
        a, b = self._operands(effort.beside_matmul, torch.float32)
        product = torch.mm(a, b)
        source = self._random(effort.beside_bytes // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        beside = {"matmul": lambda: torch.mm(a, b, out=product), "memory": lambda: torch.add(source, 1.0, out=target)}
        # gloo cannot say when a reduce-scatter is done; its gather stands for all collectives.
        cases = {"all_gather": "fp32"}
        slowdowns: dict[str, dict[str, float]] = {}
        for collective, dtype in cases.items():
            launch = launcher(collective, dist.group.WORLD, effort.beside_bytes, DTYPES[dtype], device)
            own_alone_ns = collective_ns(clock, launch, calls_for(effort.beside_bytes, clock))
            alone_ns = self._agreed(own_alone_ns)
            found: dict[str, float] = {}
            for kind, call in beside.items():
                self.say(f"{collective} beside {kind}")
                own_call_ns = compute_ns(clock, call)
                call_ns = self._agreed(own_call_ns)
                # The first to be done must have had company all the time: the other is given twice the work.
                launches = 1
                calls = max(1, int(launches * alone_ns / call_ns / 2.5))
                slowed_ns, _ = beside_ns(clock, launch, launches, call, calls)
                found[kind] = max(1.0, slowed_ns / own_call_ns)
                calls = max(1, math.ceil(2 * launches * alone_ns / call_ns))
                _, slowed_ns = beside_ns(clock, launch, launches, call, calls)
                found[f"own_{kind}"] = max(1.0, slowed_ns / own_alone_ns)
            slowdowns[collective] = found
        kinds = [f"{own}{kind}" for kind in beside for own in ("", "own_")]
        mean = {kind: sum(each[kind] for each in slowdowns.values()) / len(slowdowns) for kind in kinds}
        self.quantities["slowdowns"] = {"other": mean}
        self.quantities["collective_slowdown"] = mean["own_matmul"]

    def result(self) -> dict[str, Any]:
        """Everything measured, as JSON has it; the same structure on every rank."""
        return {
            "quantities": self.quantities,
            "curves": self.curves,
            "tables": self.tables,
            "facts": self.facts,
        }

    # --- compute

    def _random(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, device=self.device).to(dtype)

    def _operands(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `x @ weight.t()` has them."""
        rows, inner, columns = shape
        return self._random(rows, inner, dtype=dtype), self._random(columns, inner, dtype=dtype).t()

    def _matmul(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[int, float]:
        a, b = self._operands(shape, dtype)
        flops = 2 * math.prod(shape)
        return flops, flops / compute_ns(self.clock, lambda: torch.mm(a, b), self._rounds, ahead=self.load) * 1e9

    @property
    def _rounds(self) -> int:
        """Samples of a measurement: under load, which takes long, each is long enough to stand alone."""
        return 3 if self.load is None else 1

    def _copy_rate(self, size_bytes: int) -> float:
        """Bytes read and written a second."""
        source = self._random(size_bytes // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        return 2 * source.nbytes / compute_ns(self.clock, lambda: target.copy_(source)) * 1e9

    def _load(self) -> Callable[[], None] | None:
        """Launches matmuls that take `load_s`; None on a device that does not slow down under load."""
        if self.effort.load_s <= 0:
            return None
        a, b = self._operands(self.effort.beside_matmul, torch.bfloat16)
        product = torch.mm(a, b)
        calls = max(1, round(self.effort.load_s * 1e9 / compute_ns(self.clock, lambda: torch.mm(a, b, out=product))))

        def launch() -> None:
            for _ in range(calls):
                torch.mm(a, b, out=product)

        return launch

    def _attention(self, case: Attention, dtype: torch.dtype) -> tuple[float, float]:
        """ns of forward and of backward."""
        query, key, value = (each.requires_grad_() for each in self._attention_inputs(case, dtype))
        with torch.no_grad():
            forward_ns = compute_ns(self.clock, lambda: _attend(query, key, value), self._rounds, ahead=self.load)
        out = _attend(query, key, value)
        grad = torch.randn_like(out)
        backward_ns = compute_ns(
            self.clock,
            lambda: torch.autograd.grad(out, (query, key, value), grad, retain_graph=True),
            self._rounds,
            ahead=self.load,
        )
        return forward_ns, backward_ns

    def _attention_inputs(self, case: Attention, dtype: torch.dtype) -> list[Tensor]:
        """Queries, keys and values."""
        shape = (case.batch, case.heads, case.seq, case.width)
        shared = (case.batch, case.kv_heads, case.seq, case.width)
        return [self._random(*size, dtype=dtype) for size in (shape, shared, shared)]

    def _curve(self, name: str, points: Sequence[tuple[int, float]]) -> None:
        """One point a size: the median where several shapes have that size. A single size makes no curve."""
        rates: dict[int, list[float]] = {}
        for size, rate in points:
            rates.setdefault(size, []).append(rate)
        if len(rates) > 1:
            self.curves[name] = [[size, _median(rates[size])] for size in sorted(rates)]

    # --- communication

    def _agreed(self, ns: float) -> float:
        """The slowest rank's time, the same on all: what follows may depend on it."""
        slowest = torch.tensor([ns], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.item())

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
        """What passes between a kernel and a collective behind it, and back: a chain of both, less what they take."""
        size = self.effort.collective_bytes[0]
        launch = launcher("all_gather", group, size, DTYPES[self.effort.collective_dtypes[0]], self.device)
        small = self._random(16, dtype=torch.float32)

        def chain() -> None:
            small.add_(1.0)
            launch().wait()

        alone_ns = self._agreed(collective_ns(self.clock, launch, calls_for(size, self.clock)))
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
        kernel_ns = self.quantities["kernel_floor_ns"] + self.quantities["kernel_gap_ns"]
        self.quantities["collective_gap_ns"] = max(0.0, self._agreed(_median(samples)) - alone_ns - kernel_ns)

    def _coalesced(self, group: dist.ProcessGroup) -> None:
        """What one more tensor adds to a coalesced gather: small tensors, as what is large hides it.

        On 4 H200s the nine tensors of a Llama-8B layer took as long side by side as one tensor of their size.
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
        """ns of one coalesced gather of tensors with so many elements, and of one flat gather of as many bytes."""
        ranks = group.size()
        shards = [torch.zeros(math.ceil(count / ranks), dtype=dtype, device=self.device) for count in elements]
        wholes = [torch.zeros(shard.numel() * ranks, dtype=dtype, device=self.device) for shard in shards]
        size = sum(whole.nbytes for whole in wholes)
        calls = calls_for(size, self.clock)
        together = partial(group.allgather_into_tensor_coalesced, wholes, shards)
        flat = launcher("all_gather", group, size, dtype, self.device)
        together_ns = self._agreed(collective_ns(self.clock, together, calls))
        flat_ns = self._agreed(collective_ns(self.clock, flat, calls))
        self.facts[f"all_gather of {len(shards)} tensors, {size} B, coalesced, ns"] = together_ns
        self.facts[f"all_gather of one tensor, {size} B, ns"] = flat_ns
        return together_ns, flat_ns


def calls_for(size_bytes: int, clock: Clock) -> int:
    """Collectives in one sample; the same on every rank."""
    if not clock.queued:
        return 3
    return 4 if size_bytes >= 256 * MIB else 10 if size_bytes >= 16 * MIB else 30


def launcher(
    collective: str, group: dist.ProcessGroup, size_bytes: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    """Puts one collective of `size_bytes` by its own definition in flight, always over the same memory."""
    ranks = group.size()
    whole = torch.zeros(max(1, size_bytes // dtype.itemsize // ranks) * ranks, dtype=dtype, device=device)
    shard = torch.zeros(whole.numel() // ranks, dtype=dtype, device=device)
    if collective == "all_gather":
        return lambda: group._allgather_base(whole, shard)
    if collective == "reduce_scatter":
        return lambda: group._reduce_scatter_base(shard, whole, dist.ReduceScatterOptions())
    if collective == "all_reduce":
        return lambda: group.allreduce([whole])
    if collective == "all_to_all":
        result = torch.empty_like(whole)
        return lambda: group.alltoall_base(result, whole, [], [])
    if collective == "broadcast":
        return lambda: group.broadcast(whole, 0)
    raise ValueError(f"no collective {collective!r}")


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def mean_of(values: Sequence[Any]) -> Any:
    """Equal structures of numbers, with the mean of each."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean_of(items) for items in zip(*values, strict=True)]
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
