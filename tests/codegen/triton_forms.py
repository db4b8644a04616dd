"""Tilings of a body: one of every form that fits it, and those that `autotune` measures."""

from __future__ import annotations

from overlapc.codegen.triton import products, tiling
from overlapc.codegen.triton.candidates import alternatives
from overlapc.codegen.triton.tiling import Tiling, power_of_two
from overlapc.ir.body import Body, Reduce
from tests.codegen.case import Case


def variants(body: Body) -> list[tuple[str, Tiling | None]]:
    """Return the heuristic tiling (None) and one of every form that fits the body, with small tiles."""
    forms: list[tuple[str, Tiling | None]] = [("chosen", None)]
    if not body.reduction:
        if len(body.loops) >= 2:
            *rest, y, x = body.loops
            forms.append(("tiled", Tiling("tiled", (x,), 16, 2, y=(y,), yblock=8, grid=tuple(rest))))
            forms.append(("rows", Tiling("rows", (x,), 16, 1, grid=(*rest, y))))
        if len(body.loops) >= 3:
            *rest, z = rest
            layers = {"z": (z,), "zblock": 4, "grid": tuple(rest)}
            forms.append(("cubes", Tiling("tiled", (x,), 16, 2, y=(y,), yblock=8, **layers)))
        return [*forms, ("flat", Tiling("flat", body.loops, 64, 2))]
    shared = {"x": body.loops, "r": body.reduction, "num_warps": 2}
    if any(store.is_total for store in body.stores):
        rblock = power_of_two(int(body.reduction_numel()))
        forms.append(("totals", Tiling("totals", xblock=2, rblock=rblock, splits=3, **shared)))
        return [*forms, ("pipelined", Tiling("totals", xblock=2, rblock=rblock, splits=3, num_stages=2, **shared))]
    forms.append(("looped", Tiling("looped", xblock=2, rblock=16, **shared)))
    if any(isinstance(value, Reduce) and value.kind == "max" for value in body.values()):
        forms.append(("lanes", Tiling("looped", xblock=2, rblock=256, num_stages=2, **shared)))
    forms.append(("split", Tiling("split", xblock=2, rblock=8, splits=4, **shared)))
    return forms


def tilings_to_measure(case: Case) -> list[Tiling]:
    """Return the heuristic tiling and those that `autotune` measures besides it."""
    chosen = (products.choose if case.body.dots() else tiling.choose)(case.body, {})
    return alternatives(case.body, {}, chosen)
