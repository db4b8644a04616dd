"""A third party's generator: Python loops for sums and products, on the CPU and on a device unknown to overlapc."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.backend import overlapc
from overlapc.codegen import generators
from overlapc.codegen.generators import Alternative, KernelSource, Launcher
from overlapc.codegen.program_builder import build_program
from overlapc.codegen.python import PythonWrapper
from overlapc.codegen.sources import Sources, generate_kernels
from overlapc.config import Config
from overlapc.fusion import fuse_ops
from overlapc.fusion.to_schedule import to_schedule
from overlapc.ir.body import Body, Constant, Load, Op
from overlapc.lowering import Target, lower
from overlapc.runtime import support
from overlapc.warm.environment import environment_key
from overlapc.warm.fingerprint import NotCacheable

SIGNS = {"add": "+", "mul": "*"}


class Slow:
    """The generator that a third party writes to add a device."""

    def __init__(self, device_type: str, most_operations: int = 10) -> None:
        self.device_type = device_type
        self.most_operations = most_operations

    def refuse(self, body: Body) -> str | None:
        for value in body.values():
            known = isinstance(value, Load | Constant) or (isinstance(value, Op) and value.name in SIGNS)
            if not known or value.dtype != torch.float32:
                return "only sums and products of float32"
        return None

    def refuse_fused(self, body: Body) -> str | None:
        operations = sum(isinstance(value, Op) for value in body.values())
        return f"{operations} operations are too many" if operations > self.most_operations else self.refuse(body)

    def generate(
        self, body: Body, hint: str, comment: str = "", size_hints: Mapping[str, int] | None = None
    ) -> KernelSource:
        buffers = [*(store.buffer for store in body.stores), *(load.buffer for load in body.loads())]
        argument = {buffer: f"t{at}" for at, buffer in enumerate(dict.fromkeys(buffers))}
        lines, indent, name = [], "  ", {}
        for loop in body.loops:
            lines.append(f"{indent}for {loop.symbol} in range({loop.size}):")
            indent += "  "
        for at, value in enumerate(body.values()):
            if isinstance(value, Load):
                text = f"{argument[value.buffer]}[{value.index}]"
            elif isinstance(value, Constant):
                text = repr(value.number)
            else:
                assert isinstance(value, Op)
                text = SIGNS[value.name].join(name[operand] for operand in value.args)
            name[value] = f"v{at}"
            lines.append(f"{indent}v{at} = {text}")
        lines += [f"{indent}{argument[store.buffer]}[{store.index}] = {name[store.value]}" for store in body.stores]
        text = "\n".join([f"def kernel({', '.join(argument.values())}):", *lines])
        return KernelSource(f"slow_{hashlib.sha256(text.encode()).hexdigest()[:8]}", text, tuple(argument))

    def combine(self, bodies: Sequence[Body], hint: str, comment: str = "") -> KernelSource:
        parts = [self.generate(body, hint) for body in bodies]
        buffers = tuple(dict.fromkeys(buffer for part in parts for buffer in part.buffers))
        names = {buffer: f"b{at}" for at, buffer in enumerate(buffers)}
        calls = [f"  kernel({', '.join(names[buffer] for buffer in part.buffers)})" for part in parts]
        lines = [line for part, call in zip(parts, calls, strict=True) for line in (*_indented(part.text), call)]
        text = "\n".join([f"def kernels({', '.join(names.values())}):", *lines])
        return KernelSource(f"slow_{hashlib.sha256(text.encode()).hexdigest()[:8]}", text, buffers)

    def alternatives(
        self, bodies: Sequence[Body], hint: str, size_hints: Mapping[str, int] | None = None, around: Any = None
    ) -> Sequence[Alternative]:
        return [Alternative(self.generate(bodies[0], hint) if len(bodies) == 1 else self.combine(bodies, hint))]

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        return {source.name: _launcher(source) for source in sources}


def _indented(text: str) -> list[str]:
    return ["  " + line for line in text.splitlines()]


def _launcher(source: KernelSource) -> Launcher:
    made: dict[str, Any] = {}
    exec(source.text, made)
    function = made.get("kernels") or made["kernel"]

    def launch(*tensors: Tensor) -> None:
        memory = [tensor.untyped_storage() for tensor in tensors]
        function(*(torch.empty(0).set_(storage).numpy() for storage in memory))  # type: ignore[call-overload]

    return launch


@pytest.fixture
def on_cpu() -> Iterator[Callable[[int], None]]:
    """Return a function that registers `Slow` for the CPU; the built-in generator is restored after the test."""
    cpp = generators.generator_for("cpu")
    yield lambda most_operations: generators.register(Slow("cpu", most_operations))
    generators.register(cpp)


def compiled(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, int, int]:
    """Compile and run `function`; return its results, the number of kernels, and the number of fallback calls."""
    torch._dynamo.reset()
    counters["overlapc"].clear()
    results = torch.compile(function, backend=overlapc, dynamic=False)(*inputs)
    return results, counters["overlapc"]["kernels"], counters["overlapc"]["fallbacks"]


def test_refused_ops_are_called_and_other_ops_are_generated_and_fused(on_cpu: Callable[[int], None]) -> None:
    on_cpu(10)
    x, y = torch.randn(3, 5), torch.randn(5)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return ((x + y) * 2).sin() * y + x

    result, kernels, fallbacks = compiled(function, x, y)
    torch.testing.assert_close(result, function(x, y))
    assert (kernels, fallbacks) == (2, 1)


@pytest.mark.parametrize(("most_operations", "kernels"), [(1, 4), (2, 2), (4, 1)])
def test_fusion_respects_the_generators_refusals(
    on_cpu: Callable[[int], None], most_operations: int, kernels: int
) -> None:
    on_cpu(most_operations)
    x = torch.randn(20)

    def function(x: Tensor) -> Tensor:
        return (((x + x) * x) + x) * x

    result, made, fallbacks = compiled(function, x)
    torch.testing.assert_close(result, function(x))
    assert (made, fallbacks) == (kernels, 0)


def test_kernels_of_one_kind_share_a_launch(on_cpu: Callable[[int], None]) -> None:
    on_cpu(10)
    many = [torch.randn(count) for count in (3, 4, 5, 6)]
    result, kernels, _ = compiled(lambda *many: [x * 2 for x in many], *many)
    torch.testing.assert_close(result, [x * 2 for x in many])
    assert kernels == 1


def test_steps_with_a_third_partys_kernels_are_not_cached_on_disk(on_cpu: Callable[[int], None]) -> None:
    on_cpu(10)
    with pytest.raises(NotCacheable, match="for cpu"):
        environment_key(Config.of({}))


def test_a_third_partys_device_uses_its_own_kernels_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is simulated with CPU memory; its kernels and its allocations use its own device type."""
    monkeypatch.setattr(generators, "_generators", {})
    generators.register(Slow("mtia"))
    with FakeTensorMode():
        given = torch.empty(6, 4, device="mtia")
        gm = make_fx(lambda x: ((x + 1) * x + 2,), tracing_mode="real")(given)
    lowered = lower(gm, "test", target=Target(generates=lambda device: generators.has_generator(device.type)))
    ops, _ = fuse_ops(lowered)
    schedule = to_schedule(ops, lowered, ())
    wrapper = PythonWrapper(build_program(schedule, lowered, generate_kernels(schedule, Sources(lowered))))
    devices = []

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        devices.append(device.type)
        return support.empty_cpu(size, stride, dtype)

    wrapper.objects["rt"] = types.SimpleNamespace(**vars(support) | {"empty": empty})
    x = torch.randn(6, 4)
    (result,) = wrapper.function(generators.load("mtia", wrapper.program.kernels(), Path()))([x])
    torch.testing.assert_close(result, (x + 1) * x + 2)
    assert devices == ["mtia"]
