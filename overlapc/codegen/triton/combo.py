"""Several kernels with one template in one launch: each part gets a range of programs, which select its arguments.

    def step(t0, t1, t2, t3, XBLOCK: tl.constexpr):
        program = tl.program_id(0)
        if program < 4:
            number, in0, out0, n = program - 0, t0, t1, 4096
        else:
            number, in0, out0, n = program - 4, t2, t3, 100
        step_part(number, in0, out0, n, XBLOCK)

The selection is a binary search, so that many parts cost a program only a few branches, and are compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from overlapc.codegen.generators import KernelSource
from overlapc.codegen.triton import tiling as tilings
from overlapc.codegen.triton.expressions import POINTER
from overlapc.codegen.triton.functions import HEADER, Function, Functions, function_text, functions_of, named_source
from overlapc.codegen.triton.shape import KernelShape
from overlapc.codegen.triton.tiling import Tiling
from overlapc.ir.body import Body
from overlapc.ir.template import SIZE, Template, template_of
from overlapc.runtime.triton_kernel import Stage, TritonLaunch

_PROGRAMS = 16 * tilings.MULTIPROCESSORS  # programs for all parts of split reductions: a few waves of the device


@dataclass(frozen=True, slots=True)
class _Part:
    """The arguments of one part of a launch."""

    tensors: Mapping[str, str]  # the template's buffers -> arguments of the launch
    known: Mapping[sympy.Symbol, int]  # value of SIZE, if the template has one


def combo_source(bodies: Sequence[Body], name: str, comment: str = "", tiling: Tiling | None = None) -> KernelSource:
    """Return the source of one launch for `bodies`, which have one template. tiling: default for the largest body."""
    templates = [template_of(body) for body in bodies]
    kind = templates[0].body
    tiling = tiling or _chosen(templates)[1]
    dtypes = tilings.memory_dtypes(kind)
    types = {buffer: POINTER[dtype] for buffer, dtype in dtypes.items()}
    given = dict.fromkeys(
        (buffer, types[f"b{at}"]) for template in templates for at, buffer in enumerate(template.buffers)
    )
    tensors = {pointer: f"t{at}" for at, pointer in enumerate(given)}  # a buffer, seen as one type
    parts = [_part(template, types, tensors) for template in templates]
    sizes = tuple(part.known for part in parts) if templates[0].size is not None else ()
    made = functions_of(KernelShape(kind, tiling, f"{name}_part", "program", sizes))
    text = f"# {len(parts)} parts, each {made.shape.describe()}\n{HEADER}"
    stages = []
    for function in made.functions:
        text += function_text(function.name, ["program", *made.parameters()], function.lines)
        counts = [int(function.programs.subs(part.known)) for part in parts]
        launched = f"{function.name}_of_all"
        lines = _dispatch(function, made, parts, counts)
        parameters = [*tensors.values(), *(f"all_{item.name}" for item in made.scratch)]
        parameters += [f"{key}: tl.constexpr = {value}" for key, value in made.constants.items()]
        text += function_text(launched, parameters, lines)
        stages.append(Stage(launched, sympy.Integer(sum(counts)), function.num_warps, tiling.num_stages))
    launch = TritonLaunch(
        stages=tuple(stages),
        pointers=tuple(kind for _, kind in tensors),
        scratch=tuple((item.dtype, item.elements * len(parts)) for item in made.scratch),
        constants=tuple(made.constants.items()),
        index_bounds=None,
    )
    return named_source(name, text, tuple(buffer for buffer, _ in tensors), (), comment, launch)


def combo_tiling(bodies: Sequence[Body]) -> tuple[Body, dict[sympy.Symbol, int], Tiling]:
    """Return the template of `bodies`, its largest size, and the tiling that `combo_source` chooses."""
    templates = [template_of(body) for body in bodies]
    return (templates[0].body, *_chosen(templates))


def _chosen(templates: Sequence[Template]) -> tuple[dict[sympy.Symbol, int], Tiling]:
    """Return the largest size, and a tiling for it."""
    first = templates[0]
    largest = {} if first.size is None else {SIZE: max(template.size or 0 for template in templates)}
    return largest, _with_fewer_splits(tilings.choose(first.body, largest), len(templates))


def _part(template: Template, types: Mapping[str, str], tensors: Mapping[tuple[str, str], str]) -> _Part:
    given = {f"b{at}": tensors[buffer, types[f"b{at}"]] for at, buffer in enumerate(template.buffers)}
    return _Part(given, {} if template.size is None else {SIZE: template.size})


def _with_fewer_splits(tiling: Tiling, parts: int) -> Tiling:
    """Return `tiling` with fewer splits if many parts fill the device together."""
    if tiling.form != "split":
        return tiling
    fewer = max(2, tilings.power_of_two_below(_PROGRAMS // parts))
    return tiling.with_splits(min(tiling.splits, fewer))


def _dispatch(function: Function, made: Functions, parts: Sequence[_Part], counts: Sequence[int]) -> list[str]:
    """Return the launched function's lines: a binary search for the part of this program, and the call."""
    shape = made.shape
    firsts = [sum(counts[:at]) for at in range(len(parts))]
    lines = ["    program = tl.program_id(0)"]

    def pick(low: int, high: int, depth: int) -> None:
        indent = "    " * depth
        if high - low == 1:
            part = parts[low]
            lines.append(f"{indent}number = ops.number_in_part(program, {firsts[low]})")
            lines.extend(f"{indent}{name} = {part.tensors[buffer]}" for buffer, name in shape.arguments.items())
            for item in made.scratch:
                lines.append(f"{indent}{item.name} = all_{item.name} + {low * int(item.elements)}")
            for symbol, size in part.known.items():
                lines.append(f"{indent}{symbol} = tl.full([], {size}, {shape.index_dtype})")
            return
        middle = (low + high) // 2
        lines.append(f"{indent}if program < {firsts[middle]}:")
        pick(low, middle, depth + 1)
        lines.append(f"{indent}else:")
        pick(middle, high, depth + 1)

    pick(0, len(parts), 1)
    if parts[0].known and all(size % 16 == 0 for part in parts for size in part.known.values()):
        lines.append(f"    {SIZE} = tl.multiple_of({SIZE}, 16)")
    given = [*shape.arguments.values(), *(item.name for item in made.scratch), *map(str, shape.sizes), *made.constants]
    lines.append(f"    {function.name}(number, {', '.join(given)})")
    return lines
