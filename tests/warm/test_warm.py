"""Warm starts: cached graphs and steps are found, used, and verified."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlapc.config import Config
from overlapc.passes.base import PassReport, register_pass
from overlapc.report import record
from overlapc.report.text import graph_text
from overlapc.runtime import cpp_launch
from overlapc.runtime.cache import KernelCache
from overlapc.runtime.counters import counted
from overlapc.warm import cached_graph, cached_step, stored
from overlapc.warm.environment import environment_key
from overlapc.warm.fingerprint import NotCacheable
from tests import ROOT
from tests.caches import new_cache

COUNTERS = ("kernel_compiles", "graph_compiles", "steps_from_cache", "graph_cache_hits", "kernels", "graphs")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.nn.functional.silu(self.up(x)))).square().mean()


def step(model: nn.Module, cache: Path, x: Tensor, **options: Any) -> tuple[list[Tensor], dict[str, int]]:
    """Compile as in a new process and run one step; return (loss and gradients, increase of the counters)."""
    torch._dynamo.reset()
    before = {name: counted(name) for name in COUNTERS}
    model.zero_grad(set_to_none=True)
    options = {"cache_dir": str(cache), "warm_start": True, "profile": "cpu-gloo", **options}
    compiled = torch.compile(model, backend="overlapc", options=options)
    loss = compiled(x)
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *grads], {name: counted(name) - before[name] for name in COUNTERS}


@pytest.fixture
def block() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Block(), torch.randn(8, 16)


@pytest.fixture(scope="module")
def after_a_step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """The cache after a step of `block`, and the step's results."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 16)
    folder = new_cache(tmp_path_factory.mktemp("warm") / "cache")
    return folder, step(model, folder, x)[0]


@pytest.fixture
def warm_cache(after_a_step: tuple[Path, list[Tensor]], tmp_path: Path) -> Path:
    """A cache of this test alone, as it is after a step of `block`."""
    return shutil.copytree(after_a_step[0], tmp_path / "warm", symlinks=True)


def test_a_second_start_compiles_nothing_and_gives_the_same_bits(block, cache: Path):
    model, x = block
    record.clear()
    first, cold = step(model, cache, x)
    second, warm = step(model, cache, x)
    assert cold["graph_compiles"] == 2
    assert cold["kernel_compiles"] > 0
    assert warm["steps_from_cache"] == 1
    assert (warm["kernel_compiles"], warm["graph_compiles"]) == (0, 0)
    assert (warm["kernels"], warm["graphs"]) == (cold["kernels"], 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    graphs = record.report_of_process().steps[0].graphs
    assert len(graphs) == 4
    assert [graph.found for graph in graphs] == ["", "", "step", "step"]
    assert "s from the disk cache: the whole step" in graph_text(graphs[2])
    for early, late in zip(graphs[:2], graphs[2:], strict=True):
        assert late.name != early.name
        assert late.schedule.splitlines()[0].split()[1] == late.name
        assert (late.after, late.peak_bytes, late.kernels) == (early.after, early.peak_bytes, early.kernels)


def test_every_process_starts_warm(tmp_path: Path):
    script = """
import sys, torch
from overlapc.runtime.cache import KernelCache
from overlapc.runtime.counters import counted
from tests.warm.test_warm import Block
torch.manual_seed(0)
model = Block()
options = {"cache_dir": sys.argv[1], "warm_start": True}
loss = torch.compile(model, backend="overlapc", options=options)(torch.randn(8, 16))
loss.backward()
print("SAW", counted("kernel_compiles"), counted("steps_from_cache"), loss.item(), model.up.weight.grad.sum().item())
"""
    seen = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=200
        )
        assert "SAW" in done.stdout, done.stderr
        seen.append(done.stdout.split("SAW")[1].split())
    assert int(seen[0][0]) > 0
    assert seen[0][1] == "0"
    assert seen[1][:2] == ["0", "1"]
    assert seen[0][2:] == seen[1][2:]


def test_another_graph_option_or_switch_has_another_cache_entry(block, warm_cache: Path):
    model, x = block
    assert step(model, warm_cache, x, fusion=False)[1]["steps_from_cache"] == 0
    assert step(model, warm_cache, x[:4])[1]["steps_from_cache"] == 0
    model.up.bias.requires_grad_(False)
    assert step(model, warm_cache, x)[1]["steps_from_cache"] == 0
    model.up.bias.requires_grad_(True)
    assert step(model, warm_cache, x)[1]["steps_from_cache"] == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert step(model, warm_cache, x)[1]["steps_from_cache"] == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_precision_of_products_has_another_cache_entry(block, warm_cache: Path):
    model, x = block
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"  # after this torch's older function, get_float32_matmul_precision, raises
    try:
        assert step(model, warm_cache, x)[1]["steps_from_cache"] == 0
    finally:
        products.fp32_precision = before
    assert step(model, warm_cache, x)[1]["steps_from_cache"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, number: torch.where(x > number, x, number),
        lambda x, number: x.clamp(-number, number) * number,
    ],
)
def test_a_step_that_fixed_the_value_of_a_number_is_not_used_for_another(function, cache: Path):
    x = torch.randn(6, 5)
    for _ in range(2):  # the second time in place of another process
        torch._dynamo.reset()
        call = torch.compile(function, backend="overlapc", options={"cache_dir": cache})
        for number in (0.35, 0.5, 0.25, 0.75):  # Dynamo passes the second one and later ones as tensors
            torch.testing.assert_close(call(x, number), function(x, number))


def test_a_graph_of_another_order_replaces_its_entry(warm_cache: Path):
    key = next(warm_cache.glob("graphs/**/*.graph.json")).name.removesuffix(".graph.json")
    graph = cached_graph.find(key, warm_cache)
    assert graph is not None
    cached_graph.store(key, replace(graph, order="another"), warm_cache)
    found = cached_graph.find(key, warm_cache)
    assert found is not None
    assert found.order == "another"


def test_warm_start_can_be_off(block, cache: Path):
    model, x = block
    step(model, cache, x, warm_start=False)
    assert not list(cache.glob("graphs/**/*.json"))
    assert step(model, cache, x, warm_start=False)[1]["steps_from_cache"] == 0


@pytest.mark.parametrize("kind", ["graphs", "steps"])
@pytest.mark.parametrize("damage", ["torn", "other", "gone"])
def test_a_damaged_entry_is_compiled_again(block, after_a_step, warm_cache: Path, kind: str, damage: str):
    model, x = block
    entry = sorted(warm_cache.glob(f"{kind}/**/*.json"))[0]
    if damage == "torn":
        entry.write_bytes(entry.read_bytes()[:-20])
    elif damage == "gone":
        entry.unlink()
    else:  # a valid checksum, but not an entry that overlapc writes
        entry.write_text("{}")
        entry.with_name(f"{entry.name}.sha256").write_text(KernelCache(warm_cache, kind)._checksum(entry, b"{}"))
    again, counts = step(model, warm_cache, x)
    assert counts["steps_from_cache"] == 0
    assert all(torch.equal(a, b) for a, b in zip(after_a_step[1], again, strict=True))
    assert step(model, warm_cache, x)[1]["steps_from_cache"] == 1


class Stateful(nn.Module):
    """Changes a buffer; with `adds_up` it also adds the loss, which requires a gradient, to another buffer. That step
    cannot be cached."""

    def __init__(self, *, adds_up: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.total = nn.Buffer(torch.zeros(())) if adds_up else None

    def forward(self, x: Tensor) -> Tensor:
        loss = self.norm(self.linear(x)).square().mean()
        if self.total is not None:
            self.total.add_(loss)
        return loss


@pytest.mark.parametrize("adds_up", [False, True])
def test_graphs_start_warm_where_steps_cannot(cache: Path, adds_up: bool):
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    results, counts, buffers = [], [], []
    record.clear()
    for _ in range(2):
        torch.manual_seed(1)
        model = Stateful(adds_up=adds_up)
        result, count = step(model, cache, x)
        results.append(result)
        counts.append(count)
        buffers.append(model.norm.running_mean.clone())
    assert counts[1]["steps_from_cache"] == (0 if adds_up else 1)
    found = [graph.found for graph in record.report_of_process().steps[0].graphs]
    assert found == ["", "", *["graph" if adds_up else "step"] * 2]
    assert (counts[1]["graph_compiles"], counts[1]["kernel_compiles"]) == (0, 0)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(*buffers)
    assert model.total is None or torch.equal(model.total, results[1][0])
    assert buffers[0].abs().sum() > 0


def squares(x: Tensor, weight: Tensor, returned: bool) -> tuple[Tensor, Tensor | None]:
    """The backward reads the product, which it may free unless the caller gets it as well."""
    product = x @ weight
    return product.square().sum(), product.detach() if returned else None


def test_equal_backwards_that_may_free_other_inputs_have_entries_of_their_own(tmp_path: Path):
    def peak_of_backward(cache: str, returned: bool) -> int:
        torch._dynamo.reset()
        record.clear()
        options = {"cache_dir": str(new_cache(tmp_path / cache)), "warm_start": True, "profile": "cpu-gloo"}
        call = torch.compile(squares, backend="overlapc", options=options)
        call(torch.ones(64, 64), torch.ones(64, 64, requires_grad=True), returned)[0].backward()
        return record.report_of_process().steps[0].graphs[1].peak_bytes

    freed = peak_of_backward("first", False)
    assert freed < peak_of_backward("first", True) == peak_of_backward("second", True)


def test_tensors_in_a_cached_graph_are_those_of_this_process(cache: Path):
    def double(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])

    for _ in range(2):
        torch._dynamo.reset()
        options = {"cache_dir": str(cache), "warm_start": True, "profile": "cpu-gloo"}
        compiled = torch.compile(double, backend="overlapc", options=options)
        assert torch.equal(compiled(torch.ones(3)), torch.tensor([1.0, 2.0, 3.0]))


class Extended(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([torch.tensor([], dtype=x.dtype), x.flatten()]).view(x.shape))


def test_a_step_that_writes_an_empty_tensor_starts_warm(cache: Path):
    """Hugging Face's models make one in each layer, for keys that a cache holds."""
    torch.manual_seed(0)
    model, x = Extended(), torch.randn(8, 16)
    cold, _ = step(model, cache, x)
    warm, counts = step(model, cache, x)
    assert counts["steps_from_cache"] == 1
    assert all(torch.equal(*pair) for pair in zip(cold, warm, strict=True))


def test_foreign_passes_given_by_name_are_not_cacheable():
    """Their code is not part of the key, so after a change of a pass, the old graph would be found."""
    environment_key(Config.of({"passes": "bucket,sink_waits"}))
    register_pass("somebody_elses")(lambda schedule, ctx: (schedule, PassReport("somebody_elses")))
    for passes in ("bucket,somebody_elses", "tests.passes.test_base:renaming"):
        with pytest.raises(NotCacheable, match="is not part of overlapc"):
            environment_key(Config.of({"passes": passes}))


def test_functions_among_options_are_not_cacheable():
    with pytest.raises(NotCacheable, match="estimates"):
        environment_key(Config.of({"estimates": lambda node: None}))
    with pytest.raises(NotCacheable, match="passes"):
        environment_key(Config.of({"passes": lambda schedule, ctx: None}))
    assert environment_key(Config.of({})) == environment_key(Config.of({}))
    assert environment_key(Config.of({})) != environment_key(Config.of({"overlap_margin": 2.0}))
    assert environment_key(Config.of({})) == environment_key(Config.of({"rank_timeout": 2.0}))


def test_stored_values_come_back_equal():
    import sympy
    from torch.utils._sympy.functions import FloorDiv

    s0 = sympy.Symbol("s0", integer=True, positive=True)
    values = (1, 2.5, "x", None, True, (1, (2,)), {"a": [s0 + 1]}, FloorDiv(s0, 8), torch.bfloat16)
    back = stored.decode(stored.encode(values))
    assert back == values
    assert back[6]["a"][0].free_symbols.pop().is_positive
    with pytest.raises(NotCacheable, match="cannot be stored"):
        stored.encode(object())
    with pytest.raises(ValueError, match="not a dataclass of overlapc"):
        stored.decode({"data": "os:system", "fields": {}})
    for unreadable in (sympy.oo, sympy.true, sympy.Piecewise((s0, s0 > 3), (0, True))):
        with pytest.raises(NotCacheable, match="cannot be stored"):
            stored.encode([unreadable])


@pytest.mark.parametrize("kind", ["graphs", "steps", "kernels"])
def test_swapped_entries_do_not_run(cache: Path, kind: str):
    """Each program would compute the other's numbers. The checksum of an entry therefore includes its name."""
    programs = [lambda x: x.sin() + 1, lambda x: x.cos() * 2 + x.tan()]
    options = {"cache_dir": str(cache), "warm_start": True, "profile": "cpu-gloo"}
    x = torch.linspace(0, 1, 64)

    def run() -> list[Tensor]:
        torch._dynamo.reset()
        return [torch.compile(each, backend="overlapc", options=options)(x) for each in programs]

    expected = run()
    suffix = {"graphs": ".graph.json", "steps": ".step.json"}.get(kind, ".so")
    entries = [path for path in (cache / kind).rglob(f"*{suffix}") if path.is_file()]
    for one, other in itertools.pairwise(entries):
        for end in ("", ".sha256"):
            first, second = (each.with_name(each.name + end) for each in (one, other))
            aside = first.rename(first.with_name("aside"))
            second.rename(first)
            aside.rename(second)
    for cache in (cached_graph._cache, cached_step._cache, cpp_launch._cache):
        cache.cache_clear()  # as in another process
    assert len(entries) >= 2
    for found, right in zip(run(), expected, strict=True):
        assert torch.equal(found, right)
