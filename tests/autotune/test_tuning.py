"""`autotune`: every kernel uses the fastest measured tiling; tilings are measured once, and all ranks use the same."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.agreement.rank_agreement import Peers
from overlapc.autotune import Tuning, timing, tune
from overlapc.autotune.search import Trial
from overlapc.autotune.tuning import choose
from overlapc.codegen import generators
from overlapc.codegen.cpp.kernel import CppGenerator
from overlapc.codegen.generators import Alternative, KernelSource
from overlapc.codegen.sources import Sources, generate_kernels
from overlapc.codegen.triton import candidates
from overlapc.config import Config
from overlapc.errors import ConfigError, ToolchainError
from overlapc.estimators.calibration import clock
from overlapc.fusion.to_schedule import to_schedule
from overlapc.ir.body import Body
from overlapc.ir.ops import Loops, LoweredGraph
from overlapc.report import record
from overlapc.runtime.counters import counted
from overlapc.schedule.model import Estimate, Node, Schedule
from tests.codegen.interpreted import triton_on_cpu
from tests.fusion.small_graphs import extern, graph, pointwise
from tests.lowering.against_eager import compiled


class Paced(CppGenerator):
    """A C++ generator whose tilings take known times: a launch computes nothing and only advances a fake clock."""

    def __init__(self, paces_ms: Mapping[str, float]) -> None:
        self.paces_ms = paces_ms  # by suffix of the kernel's name; "" is the heuristic tiling
        self.neighbours: dict[str, tuple[str, ...]] = {}  # by suffix; a tiling not listed has all tilings as neighbours
        self.refused: str | None = None
        self.loaded: Counter[str] = Counter()  # by thread and name
        self._spent = threading.local()

    def alternatives(
        self, bodies: Sequence[Body], hint: str, size_hints: Mapping[str, int] | None = None, around: Any = None
    ) -> list[Alternative]:
        (body,) = bodies
        source = self.generate(body, hint, size_hints=size_hints)
        return [
            Alternative(replace(source, name=source.name + suffix, text=f"# tiling{suffix}"), suffix)
            for suffix in self.neighbours.get(around or "", tuple(self.paces_ms))
        ]

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> dict[str, Callable[..., None]]:
        if any(source.name.endswith(self.refused or "nothing") for source in sources):
            raise ToolchainError("too much shared memory")
        self.loaded.update(f"{threading.get_ident()} {source.name}" for source in sources)
        return {source.name: self._launcher(source.name) for source in sources}

    def _launcher(self, name: str) -> Callable[..., None]:
        suffix = next((each for each in self.paces_ms if each and name.endswith(each)), "")

        def launch(*_: Any) -> None:
            self._spent.seconds = self.clock() + self.paces_ms[suffix] / 1e3

        return launch

    def clock(self) -> float:
        """Return the seconds that this thread's launches took on the fake clock."""
        return getattr(self._spent, "seconds", 0.0)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Paced]:
    cpp = generators.generator_for("cpu")
    generator = Paced({"": 6.0, "_b": 0.2, "_c": 8.0})
    generators.register(generator)
    of_launches = SimpleNamespace(perf_counter=generator.clock, monotonic=generator.clock, sleep=time.sleep)
    for module in (clock, timing):
        monkeypatch.setattr(module, "time", of_launches)
    yield generator
    generators.register(cpp)


def kernels(count: int = 2) -> tuple[Schedule, LoweredGraph]:
    """Return a schedule of `count` kernels of different sizes, the first of which is launched twice."""
    ops = [pointwise(f"x{at}", "a", elements=at) for at in (1, *range(1, count + 1))]
    ops[0] = pointwise("x", "b", elements=1)
    made = graph([ops[0], extern("m", "c"), *ops[1:]], ["x", "m", *(f"x{at}" for at in range(1, count + 1))])
    return to_schedule(made.ops, made), made


def weigh(node: Node) -> Estimate:
    return Estimate(float(node.work.write_bytes) if node.work else 0.0, "bytes")


def tuned(cache_dir: Path, seconds: float = 60.0, count: int = 2) -> Tuning:
    schedule, lowered = kernels(count)
    return tune(schedule, lowered, weigh, cache_dir, seconds=seconds)


def test_every_launch_of_a_kernel_uses_its_fastest_tiling(paced: Paced, tmp_path: Path):
    schedule, lowered = kernels()
    found = tune(schedule, lowered, weigh, tmp_path, seconds=60)
    plain = generate_kernels(schedule, Sources(lowered))
    sources = generate_kernels(schedule, Sources(lowered, found.sources))
    assert {name: source.name for name, source in sources.items()} == {
        name: source.name + "_b" for name, source in plain.items()
    }
    assert (sources["x"].buffers, sources["x1"].buffers) == (plain["x"].buffers, plain["x1"].buffers)
    estimates = [found.estimate(schedule.node(name)) for name in ("x", "x1", "x2", "m")]
    assert estimates[3] is None
    assert [each.ns for each in estimates[:3] if each is not None] == pytest.approx([0.2e6] * 3)
    assert found.summary().startswith("2 of 2 kernels measured, 2 changed: ")
    assert set(paced.loaded.values()) == {1}


def test_the_search_continues_at_the_neighbours_of_a_faster_tiling(paced: Paced, tmp_path: Path):
    paced.paces_ms = {"": 8.0, "_b": 4.0, "_c": 9.0, "_d": 0.5, "_e": 9.0, "_f": 0.1}
    paced.neighbours = {"": ("", "_b", "_c"), "_b": ("_b", "_d", ""), "_d": ("_d", "_e"), "_c": ("_c", "_f")}
    found = tuned(tmp_path, count=1)
    (choice,) = found.choices.values()
    assert choice.tiling == "tiling_d"
    assert {name[-2:] for name in paced.loaded} >= {"_b", "_c", "_d", "_e"}
    assert not any(name.endswith("_f") for name in paced.loaded)  # a neighbour only of _c, which is slower
    paced.loaded.clear()
    assert tuned(tmp_path, count=1) == found
    assert not paced.loaded


def test_a_search_that_ran_out_of_time_continues_in_the_next_run(paced: Paced, tmp_path: Path):
    paced.paces_ms = {"": 8.0, "_b": 4.0, "_d": 0.2}
    paced.neighbours = {"": ("", "_b"), "_b": ("_b", "_d")}
    (first,) = tuned(tmp_path, count=1, seconds=1e-3).choices.values()
    (second,) = tuned(tmp_path, count=1).choices.values()
    assert (first.tiling, second.tiling) == ("tiling_b", "tiling_d")
    assert second.heuristic_ns == first.heuristic_ns  # the heuristic tiling was not measured again


def test_cached_times_are_not_measured_again(paced: Paced, tmp_path: Path):
    first = tuned(tmp_path)
    paced.loaded.clear()
    assert tuned(tmp_path) == first
    assert not paced.loaded


@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("text", ["[]", '{"x": 1}', '{"x": "fast"}'])
def test_a_malformed_cache_entry_is_measured_again(paced: Paced, tmp_path: Path, text: str, vouched: bool):
    first = tuned(tmp_path, count=1)
    (entry,) = tmp_path.rglob("*.tilings.json")
    entry.write_text(text)
    if vouched:
        Path(f"{entry}.sha256").write_text(hashlib.sha256(text.encode()).hexdigest())
    paced.loaded.clear()
    assert tuned(tmp_path, count=1).choices.keys() == first.choices.keys()
    assert paced.loaded
    paced.loaded.clear()
    tuned(tmp_path, count=1)
    assert not paced.loaded


@pytest.mark.parametrize(("other_ns", "name"), [(96.0, "k_b"), (98.0, "k"), (104.0, "k")])
def test_a_gain_within_the_noise_changes_nothing(other_ns: float, name: str):
    (op,) = kernels(1)[1].ops[:1]
    assert isinstance(op, Loops)
    first = tuple(Alternative(KernelSource(each, "# a tiling", ("a",))) for each in ("k", "k_b", "k_c"))
    trial = Trial(op, first, ("x",), lambda alternative: first)
    found = choose(trial, {"k": 100.0, "k_b": other_ns})  # k_c could not be measured
    assert (found.source.name, found.heuristic_ns) == (name, 100.0)
    assert found.chosen_ns == (other_ns if name == "k_b" else 100.0)


def test_a_tiling_that_is_refused_is_left_out(paced: Paced, tmp_path: Path):
    paced.refused = "_b"
    found = tuned(tmp_path)
    assert len(found.choices) == 2
    assert found.sources == {}


def test_tuning_time_is_bounded_and_the_heaviest_kernels_are_tuned_first(paced: Paced, tmp_path: Path):
    schedule, lowered = kernels(9)
    found = tune(schedule, lowered, weigh, tmp_path, seconds=1e-3)  # enough for the first few kernels only
    assert 0 < len(found.choices) < 9
    heaviest = sorted(lowered.ops, key=lambda op: -(schedule.node(op.name).work.write_bytes))  # type: ignore[union-attr]
    first = [op for op in heaviest if isinstance(op, Loops)][: len(found.choices)]
    assert set(found.choices) == {Sources(lowered).of(op).name for op in first}


def on_ranks(count: int, work: Callable[[Peers, int], Tuning]) -> list[Tuning]:
    shared = dist.HashStore()
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(Peers(shared, rank, range(count)), rank), range(count)))


def test_ranks_divide_the_kernels_and_choose_alike(paced: Paced, tmp_path: Path):
    tuned(tmp_path / "1", count=3)  # rank 1 has the times of three kernels in its cache
    paced.loaded.clear()

    def work(peers: Peers, rank: int) -> Tuning:
        schedule, lowered = kernels(5)
        with peers.agreement("forward", 60) as agreement:
            return tune(schedule, lowered, weigh, tmp_path / str(rank), seconds=60, agreement=agreement)

    found = on_ranks(3, work)
    assert found[1:] == found[:1] * 2
    assert len(found[0].sources) == 5
    by_rank = Counter(name.split()[0] for name in paced.loaded)
    assert set(paced.loaded.values()) == {1}
    assert max(by_rank.values()) <= 2 * 3  # a rank measures at most two kernels in three tilings
    paced.loaded.clear()
    assert on_ranks(3, work) == found  # every rank cached the times that other ranks measured
    assert not paced.loaded


@pytest.fixture
def interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use Triton's generator, in its interpreter, for CPU tensors; with two tilings a kernel because that is slow."""
    monkeypatch.setattr(candidates, "MOST", 2)

    with triton_on_cpu():
        yield


def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.mul_(2)
    return x.softmax(1)


def run_step(**options: object) -> tuple[torch.Tensor, torch.Tensor]:
    x, total = torch.arange(12.0).view(3, 4) / 8, torch.ones(4)
    return compiled(step, **options)(x, total), total


def test_a_tuned_function_equals_eager_and_reports_its_tunings_from_each_cache(interpreted_triton: None, cache: Path):
    torch._dynamo.utils.counters.clear()
    record.clear()
    options = {"autotune": True, "cache_dir": str(cache), "profile": "cpu-gloo"}
    x = torch.arange(12.0).view(3, 4) / 8
    for keep in (True, True, False):  # measured; from the cache of compiled graphs; from the cache of times
        y, total = run_step(**options, warm_start=keep)
        torch.testing.assert_close(y, x.softmax(1))
        torch.testing.assert_close(total, torch.full((4,), 2.0))  # timing the kernel did not change the input
    assert counted("tiling_compiles") == counted("kernels") / 3
    (measured, kept, again) = record.report_of_process().steps[0].graphs
    assert measured.tuned == kept.tuned == again.tuned
    assert measured.tuned.split(",")[0].endswith("kernels measured")
    assert "block sizes" in str(record.report_of_process())


def test_deterministic_mode_measures_nothing(interpreted_triton: None, cache: Path):
    torch._dynamo.utils.counters.clear()
    run_step(autotune=True, deterministic=True, cache_dir=str(cache), profile="cpu-gloo")
    assert counted("tilings_timed") == 0
    assert not list(cache.rglob("*.tilings.json"))


def test_rank_timeout_must_exceed_autotune_seconds():
    with pytest.raises(ConfigError, match="raise rank_timeout"):
        Config(autotune=True, autotune_seconds=400)
