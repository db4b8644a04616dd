"""The interface of kernel generators, one for each device type.

A generator turns one loop `Body` into source text and later compiles all sources of a graph at once into callables. To
add a device, write a `Generator` and `register` it under torch's device type (see tests/codegen/test_third_party.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import sympy

from overlapc.errors import unknown_name

if TYPE_CHECKING:
    from overlapc.ir.body import Body
    from overlapc.ir.ops import Attention


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Generated code of one kernel.

    Buffers are renamed by first use inside the text, so equal kernels of different layers have equal text and are
    compiled once. A launch passes one tensor per entry of `buffers`, then one int per entry of `sizes`.
    """

    name: str  # a readable prefix and a hash of the text: `fused_mul_rsqrt_3f2a91c0`
    text: str
    buffers: tuple[str, ...]  # names used in the body, in argument order
    sizes: tuple[sympy.Symbol, ...] = ()
    comment: str = field(default="", compare=False)  # provenance; not part of the identity
    launch: Any = field(default=None, compare=False)  # the generator's own launch parameters (grid, block sizes, …)
    # What the launcher allocates for each launch and frees after it: partial results of a reduction.
    scratch_bytes: sympy.Expr = field(default=sympy.S.Zero, compare=False)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A kernel's source with one tiling; the format of `tiling` is private to the generator."""

    source: KernelSource
    tiling: Any = field(default=None, compare=False)


Launcher = Callable[..., None]


def direct(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return `names` with each launcher replaced by its `direct` form where it has one, for generated code."""
    return {name: getattr(value, "direct", None) or value for name, value in names.items()}


class Generator(Protocol):
    """A kernel generator for one device type.

    A compilation calls its methods in the order below; all except `load` work without real tensors.
    """

    device_type: str

    def refuse(self, body: Body) -> str | None:
        """Return why no kernel can be generated for this body (`"no scan on cpu"`), or None if it can be.

        An op that is refused becomes a library call.
        """

    def refuse_fused(self, body: Body) -> str | None:
        """Return why two kernels should not be fused into this body, or None; `refuse` accepted both kernels."""

    def generate(
        self, body: Body, hint: str, comment: str = "", size_hints: Mapping[str, int] | None = None
    ) -> KernelSource:
        """Return the source for `body`.

        hint: a readable part of the kernel's name. size_hints: values of size symbols, for heuristics.
        """

    def combine(self, bodies: Sequence[Body], hint: str, comment: str = "") -> KernelSource:
        """Return the source of one launch that runs all of `bodies`, in any order.

        All bodies have the same `ir.template`, static sizes, no checks and no totals.
        """

    def alternatives(
        self, bodies: Sequence[Body], hint: str, size_hints: Mapping[str, int] | None = None, around: Any = None
    ) -> Sequence[Alternative]:
        """Return the source that `generate` (one body) or `combine` (several) chooses, then others worth measuring.

        All of them compute the same results from the same arguments.
        around: the `tiling` of an earlier alternative; the result is then that one first, followed by similar tilings.
        """

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        """Compile sources that are not cached; return a launcher per `KernelSource.name`. ToolchainError on failure."""


@runtime_checkable
class AttentionGenerator(Protocol):
    """A generator that can also generate attention kernels."""

    def refuse_attention(self, op: Attention) -> str | None:
        """Return why no kernel can be generated for this attention (torch's op is then called), or None."""

    def attention(self, op: Attention, comment: str = "") -> KernelSource:
        """Return the source of its kernel; the kernel takes the buffers of `op.inputs` and `op.outputs`."""


@runtime_checkable
class AheadGenerator(Protocol):
    """A generator that can compile in the background."""

    def compile_ahead(self, sources: Sequence[KernelSource], cache_dir: Path) -> None:
        """Start to compile sources that are not cached. `load` waits for them, and reports errors."""


def refuse_attention(op: Attention) -> str | None:
    """Return why no kernel for this attention is generated on its device, or None."""
    generator = generator_for(op.device.type)
    if not isinstance(generator, AttentionGenerator):
        return f"no generated attention on {op.device.type}"
    return generator.refuse_attention(op)


def attention_source(op: Attention, comment: str) -> KernelSource:
    """Return the kernel source of an attention that `refuse_attention` accepted."""
    generator = generator_for(op.device.type)
    assert isinstance(generator, AttentionGenerator), f"{op.device.type} has no generated attention"
    return generator.attention(op, comment)


_generators: dict[str, Generator] = {}
_OURS = {"cpu": "overlapc.codegen.cpp", "cuda": "overlapc.codegen.triton"}  # register when imported
_LOADERS = {"cpu": "overlapc.codegen.cpp_load", "cuda": "overlapc.runtime.triton_launch"}


def register(generator: Generator) -> None:
    """Register `generator` for its device type, replacing an earlier one."""
    _generators[generator.device_type] = generator


def generator_for(device_type: str) -> Generator:
    """Return the generator of a device type; KeyError, which lists the known device types, if there is none."""
    if not has_generator(device_type):
        raise KeyError(unknown_name("kernel generator for device", device_type, {**_OURS, **_generators}))
    return _generators[device_type]


def has_generator(device_type: str) -> bool:
    """Whether a device type has a generator; overlapc's own generators are imported at the first query."""
    if device_type not in _generators and device_type in _OURS:
        importlib.import_module(_OURS[device_type])
    return device_type in _generators


def foreign() -> list[str]:
    """Return the device types whose generator is not part of overlapc."""
    return [kind for kind, generator in _generators.items() if not type(generator).__module__.startswith("overlapc.")]


def load(device_type: str, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
    """Call `Generator.load`, without importing overlapc's own generators: a warm start needs only the launchers."""
    if device_type in _generators or device_type not in _LOADERS:
        return generator_for(device_type).load(sources, cache_dir)
    launchers: Mapping[str, Launcher] = importlib.import_module(_LOADERS[device_type]).load_kernels(sources, cache_dir)
    return launchers
