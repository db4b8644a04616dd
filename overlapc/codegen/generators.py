"""The interface of kernel generators, one for each device type.

A generator turns a loop `Body` into source text and, later, many sources of a graph at once into callables. To add a
device, write a `Generator` and `register` it under torch's device type (tests/codegen/test_third_party.py does).
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
    launch: Any = field(default=None, compare=False)  # the generator's own launch facts (grid, block sizes, …)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A kernel's source in one tiling; `tiling` is in the generator's own terms."""

    source: KernelSource
    tiling: Any = field(default=None, compare=False)


Launcher = Callable[..., None]


def direct(names: Mapping[str, Any]) -> dict[str, Any]:
    """`names` as generated code calls them: a launcher's `direct` form where it has one."""
    return {name: getattr(value, "direct", None) or value for name, value in names.items()}


class Generator(Protocol):
    """One per device type. Its methods come in this order in a compilation; all but `load` work on fake tensors."""

    device_type: str

    def refuse(self, body: Body) -> str | None:
        """Why this body cannot be generated (`"no scan on cpu"`), or None: then the op is an extern call."""

    def refuse_fused(self, body: Body) -> str | None:
        """Why two kernels should not become this one, or None; `refuse` takes both of them."""

    def generate(
        self, body: Body, hint: str, comment: str = "", size_hints: Mapping[str, int] | None = None
    ) -> KernelSource:
        """Source for `body`. `hint` is a readable name part; `size_hints` gives sizes of symbols for heuristics."""

    def combine(self, bodies: Sequence[Body], hint: str, comment: str = "") -> KernelSource:
        """Source of one launch that does what all of `bodies` do, in any order; they have one `ir.template`.

        Bodies have fixed sizes, no checks and no totals.
        """

    def alternatives(
        self, bodies: Sequence[Body], hint: str, size_hints: Mapping[str, int] | None = None, around: Any = None
    ) -> Sequence[Alternative]:
        """What `generate` (of one body) or `combine` (of several) gives, then others worth measuring beside it.

        They do the same and take the same arguments. around: the `tiling` of one of them, whose neighbours are wanted;
        it comes first.
        """

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        """Compiles what is not in the cache; returns a launcher per `KernelSource.name`. ToolchainError on failure."""


@runtime_checkable
class AttentionGenerator(Protocol):
    """A generator that has kernels for attention, too."""

    def refuse_attention(self, op: Attention) -> str | None:
        """Why this attention cannot be generated (torch's op is then called), or None."""

    def attention(self, op: Attention, comment: str = "") -> KernelSource:
        """Source of its kernel; it takes the buffers of `op.inputs` and of `op.outputs`."""


def refuse_attention(op: Attention) -> str | None:
    """Why no kernel for this attention is generated on its device, or None."""
    generator = generator_for(op.device.type)
    if not isinstance(generator, AttentionGenerator):
        return f"no generated attention on {op.device.type}"
    return generator.refuse_attention(op)


def attention_source(op: Attention, comment: str) -> KernelSource:
    """The kernel of an attention that is not refused."""
    generator = generator_for(op.device.type)
    assert isinstance(generator, AttentionGenerator), f"{op.device.type} has no generated attention"
    return generator.attention(op, comment)


_generators: dict[str, Generator] = {}
_OURS = {"cpu": "overlapc.codegen.cpp", "cuda": "overlapc.codegen.triton"}  # register when imported
_LOADERS = {"cpu": "overlapc.codegen.cpp_load", "cuda": "overlapc.runtime.triton_launch"}


def register(generator: Generator) -> None:
    """Makes `generator` the one for its device type, replacing an earlier one."""
    _generators[generator.device_type] = generator


def generator_for(device_type: str) -> Generator:
    """The registered generator; KeyError naming the known device types when there is none."""
    if not has_generator(device_type):
        raise KeyError(unknown_name("kernel generator for device", device_type, {**_OURS, **_generators}))
    return _generators[device_type]


def has_generator(device_type: str) -> bool:
    """Whether there is a generator; overlapc's own are imported at the first query."""
    if device_type not in _generators and device_type in _OURS:
        importlib.import_module(_OURS[device_type])
    return device_type in _generators


def foreign() -> list[str]:
    """Device types whose generator was registered from outside of overlapc."""
    return [kind for kind, each in _generators.items() if not type(each).__module__.startswith("overlapc.")]


def load(device_type: str, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
    """`Generator.load`, without an import of the generator where a warm start needs only its launchers."""
    if device_type in _generators or device_type not in _LOADERS:
        return generator_for(device_type).load(sources, cache_dir)
    launchers: Mapping[str, Launcher] = importlib.import_module(_LOADERS[device_type]).load_kernels(sources, cache_dir)
    return launchers
