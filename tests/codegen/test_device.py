"""Generated code makes the GPU of its kernels current and restores the caller's; here GPUs are simulated on the CPU."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import overlapc.codegen.triton  # noqa: F401 (registers the generator)
from overlapc.codegen.program_builder import build_program
from overlapc.codegen.python import PythonWrapper
from overlapc.codegen.sources import Sources, generate_kernels
from overlapc.fusion import fuse_ops
from overlapc.fusion.to_schedule import to_schedule
from overlapc.lowering import lower
from overlapc.runtime import support


class Gpus:
    """Simulated GPUs: the current one, and a log of allocations and launches by GPU; generated code calls `rt`."""

    def __init__(self, current: int) -> None:
        self.current = current
        self.log: list[tuple[str, int]] = []
        self.rt = types.SimpleNamespace(**vars(support))
        self.rt.enter_device = self.enter
        self.rt.empty_cuda = self.empty

    def enter(self, index: int) -> int:
        before, self.current = self.current, index
        return before

    def empty(self, *form: Any) -> Tensor:
        self.log.append(("empty", self.current))
        return support.empty_cpu(*form)

    def launch(self, *tensors: Tensor) -> None:
        self.log.append(("launch", self.current))


def wrapper_of(function: Callable[..., Any], *devices: str, fused: bool = True) -> PythonWrapper:
    """Return generated code for `function` of one vector on each device."""
    with FakeTensorMode():
        inputs = [torch.empty(50, device=device) for device in devices]
        gm = make_fx(function, tracing_mode="real")(*inputs)
    lowered = lower(gm, "test")
    ops, _ = fuse_ops(lowered, enabled=fused)
    schedule = to_schedule(ops, lowered, ())
    return PythonWrapper(build_program(schedule, lowered, generate_kernels(schedule, Sources(lowered))))


def bound(wrapper: PythonWrapper, gpus: Gpus, launch: Callable[..., None]) -> Callable[[list[Any]], Any]:
    wrapper.objects["rt"] = gpus.rt
    return wrapper.function({kernel.name: launch for kernel in wrapper.program.kernels()})


def test_the_gpu_of_the_kernels_is_current_while_code_runs():
    gpus = Gpus(current=0)
    wrapper = wrapper_of(lambda x: (x.sin(), x.sum()), "cuda:3", fused=False)
    (result, total) = bound(wrapper, gpus, gpus.launch)([torch.ones(50)])
    assert gpus.log == [("empty", 3), ("launch", 3)] * 2
    assert gpus.current == 0
    assert (result.shape, total.shape) == ((50,), ())
    assert wrapper.source.count("enter_device") == 2


def test_the_callers_gpu_is_restored_after_an_error():
    gpus = Gpus(current=0)

    def fails(*tensors: Tensor) -> None:
        raise IndexError("out of bounds")

    with pytest.raises(IndexError, match="out of bounds"):
        bound(wrapper_of(lambda x: (x.sin(),), "cuda:1"), gpus, fails)([torch.ones(50)])
    assert gpus.current == 0


def test_kernels_of_two_gpus_run_on_their_own_gpu():
    gpus = Gpus(current=5)
    wrapper = wrapper_of(lambda x, y: (x.sin(), y.sin(), y.cos()), "cuda:0", "cuda:1", fused=False)
    bound(wrapper, gpus, gpus.launch)([torch.ones(50), torch.ones(50)])
    assert [index for what, index in gpus.log if what == "launch"] == [0, 1, 1]
    assert [index for what, index in gpus.log if what == "empty"] == [0, 1, 1]
    assert gpus.current == 5
    assert wrapper.source.count("enter_device") == 3  # none between the two kernels on the same GPU


def test_code_for_the_cpu_does_not_change_the_gpu():
    assert "enter_device" not in wrapper_of(lambda x: (x.sin(),), "cpu").source
