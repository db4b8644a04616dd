"""The tilings that heuristics choose fit the GPU's memory, and have the forms that a sweep on an H200 found fastest."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import sympy
import torch

from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.shape import tile_axes
from overlapc.codegen.triton.tiling import MULTIPROCESSORS, choose
from overlapc.ir.body import Body, Load, Reduce, Scan, Store, op
from overlapc.ir.indexing import loop_symbol
from tests.codegen.cubins import compile_source
from tests.codegen.norm_cases import norm_gradients
from tests.codegen.terms import loop, p0, p1, p2, r0, total
from tests.codegen.triton_cases import elements_and_columns, factors_of_batches, softmax, three_ways, transpose

SHARED_OF_A_PROGRAM = 99 * 1024  # bytes; the limit of compute capability 8.6 and 8.9, the lowest since 8.0
BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("width", "dtype"), [(1024, BF16), (4096, BF16), (4096, F32), (8192, BF16), (16384, BF16)])
def test_rows_are_loaded_ahead_only_if_they_fit_into_shared_memory_of_every_gpu(
    width: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    body = norm_gradients(2, 8192, width, dtype).body
    tiling = choose(body, {})
    assert tiling.form == "totals"
    rows, _ = compile_source(TritonGenerator().generate(body, "gradients"), tmp_path)
    assert rows.metadata.shared <= SHARED_OF_A_PROGRAM
    assert ("cp.async" in rows.asm["ptx"]) == (width * dtype.itemsize < 32768)


def test_a_program_has_many_short_rows_and_does_not_load_them_ahead() -> None:
    tiling = choose(norm_gradients(32, 8192, 128).body, {})
    assert (tiling.xblock * tiling.rblock, tiling.num_stages) == (4096, 0)


def test_a_single_total_of_short_rows_leaves_registers_for_more_threads() -> None:
    several = norm_gradients(32, 8192, 128).body
    one = replace(several, stores=several.stores[:2])
    assert [store.is_total for store in one.stores] == [False, True]
    tiling, other = choose(one, {}), choose(several, {})
    assert tiling.xblock * tiling.rblock // (32 * tiling.num_warps) == 8
    assert other.xblock * other.rblock // (32 * other.num_warps) == 32
    assert tiling.splits == other.splits


@pytest.mark.parametrize(
    ("width", "dtype", "ahead"),
    [(320, BF16, True), (502, BF16, True), (511, BF16, False), (320, F32, True), (502, F32, False)],
)
def test_rows_are_loaded_ahead_if_their_length_allows_pairs_of_two_bytes_or_loads_of_sixteen(
    width: int, dtype: torch.dtype, ahead: bool, tmp_path: Path
) -> None:
    body = norm_gradients(2, 8192, width, dtype).body
    rows, _ = compile_source(TritonGenerator().generate(body, "gradients"), tmp_path)
    assert ("cp.async" in rows.asm["ptx"]) == ahead


def test_columns_are_loaded_ahead_only_if_the_pass_also_stores_elements() -> None:
    stores = choose(elements_and_columns(8192, 14336).body, {})
    x = Load("x", 14336 * r0 + p0, BF16)
    sums = Body((loop(p0, 14336),), (loop(r0, 8192),), (Store("s", p0, Reduce("sum", x, F32), F32),))
    assert (stores.form, stores.num_stages) == ("looped", 3)
    assert (choose(sums, {}).form, choose(sums, {}).num_stages) == ("split", 0)


def test_long_rows_that_are_read_again_allow_one_program_per_multiprocessor() -> None:
    """A program uses half of the registers: then 132 rows of 256 KB fit into the L2 cache, which 264 would not."""
    body = softmax(2048, 128_000).body
    tiling = choose(body, {})
    assert (tiling.form, tiling.xblock, tiling.num_warps) == ("looped", 1, 32)
    elements = tiling.rblock // (32 * tiling.num_warps)
    assert 32 < elements <= 64  # values, in a register each; a thread of 1024 has 64 registers


def test_a_top_k_has_few_rows_and_many_threads_per_program() -> None:
    key = Load("x", 64 * p0 + r0, F32)
    for _ in range(6):
        key = op("sub", key, Reduce("max", key, F32))
    stores = tuple(Store("y", 8 * p0 + at, Reduce("max", key, F32), F32) for at in range(8))
    tiling = choose(Body((loop(p0, 131072),), (loop(r0, 64),), stores), {})
    assert (tiling.xblock, tiling.rblock, tiling.num_warps) == (16, 64, 8)


def test_a_row_gets_more_threads_if_there_are_few_rows() -> None:
    x = Load("x", 4096 * p0 + r0, F32)
    bodies = [
        Body((loop(p0, rows),), (loop(r0, 4096),), (Store("y", p0, Reduce("max", x, F32), F32),))
        for rows in (8, 64 * MULTIPROCESSORS)
    ]
    few, many = (choose(body, {}) for body in bodies)
    assert few.rblock == many.rblock == 4096
    assert few.num_warps == 2 * many.num_warps


@pytest.mark.parametrize(("rows", "length", "splits"), [(1, 2**20, 128), (8, 2**17, 16), (2048, 2**17, 1)])
def test_only_few_long_rows_are_scanned_by_several_programs_each(rows: int, length: int, splits: int):
    at = length * p0 + r0
    scan = Scan("sum", Load("x", at, F32), F32, r0)
    assert choose(Body((loop(p0, rows),), (loop(r0, length),), (Store("y", at, scan, F32),)), {}).splits == splits


def test_values_per_row_do_not_count_as_memory_for_loading_ahead() -> None:
    """Like LayerNorm's backward: it loads two rows, and four numbers per row."""
    at = 4096 * p0 + r0
    row = op("mul", Load("x", at, BF16), Load("g", at, BF16))
    for name in ("mean", "scale", "shift", "other"):
        row = op("mul", row, Load(name, p0, F32))
    stores = (Store("dx", at, op("sub", row, Reduce("sum", row, F32)), BF16), Store("dw", r0, row, F32, "sum"))
    assert choose(Body((loop(p0, 8192),), (loop(r0, 4096),), stores), {}).num_stages == 3


def test_a_tile_has_an_axis_for_every_loop_along_which_a_tensor_is_contiguous() -> None:
    """Without the third axis, a tile would load a whole cache sector for every element of the third tensor."""
    assert len(tile_axes(choose(transpose(1000, 2000).body, {}))) == 2
    tiling = choose(three_ways(100, 200, 150, BF16).body, {})
    assert tile_axes(tiling) == ("z", "y", "x")
    assert min(tiling.xblock, tiling.yblock, tiling.zblock) * BF16.itemsize == 32
    assert len(tile_axes(choose(three_ways(3, 200, 150).body, {}))) == 2  # too few elements along the third dim


def pixels(images: int, size: int, channels: int) -> Body:
    """Return a copy of images with interleaved channels to one in which each channel is contiguous."""
    return transpose(channels, size, images).body


@pytest.mark.parametrize("channels", [2, 3, 8, 12])
def test_interleaved_channels_of_many_pixels_are_whole_in_a_tile(channels: int) -> None:
    tiling = choose(pixels(64, 4096, channels), {})
    assert (tiling.form, tiling.y, tiling.x) == ("tiled", (loop(p1, channels),), (loop(p2, 4096),))
    assert channels <= tiling.yblock < 2 * channels
    assert tiling.xblock * tiling.yblock == 1024


@pytest.mark.parametrize(("size", "channels"), [(16, 4), (16, 16), (49, 2), (49, 12), (32, 16)])
def test_images_smaller_than_a_tile_are_read_in_one_piece(size: int, channels: int) -> None:
    assert choose(pixels(4096, size, channels), {}).form == "flat"


@pytest.mark.parametrize(("channels", "size"), [(49, 64), (4, 197)])
def test_neighbours_in_a_tile_of_odd_rows_belong_to_threads_side_by_side(
    channels: int, size: int, tmp_path: Path
) -> None:
    """Otherwise each of them would be in another cache line, of loads or of stores."""
    (kernel,) = compile_source(TritonGenerator().generate(pixels(64, size, channels), "turned"), tmp_path)
    layouts = dict(re.findall(r"#(\w+) = #ttg.blocked<\{.*?order = \[(\d)", kernel.asm["ttgir"]))
    orders = [layouts[name] for name in re.findall(r"tt.store.*#(blocked\d*)>", kernel.asm["ttgir"])]
    assert orders == ["1"]


def test_rows_of_odd_length_are_read_along_rows(tmp_path: Path) -> None:
    (kernel,) = compile_source(TritonGenerator().generate(softmax(4096, 197).body, "softmax"), tmp_path)
    assert set(re.findall(r"order = \[(\d), \d\]", kernel.asm["ttgir"])) == {"1"}


def columns(channels: int, pixels: int, streams: int = 1) -> Body:
    """Return a softmax over channels of images whose pixels are contiguous."""
    at = pixels * channels * p0 + pixels * r0 + p1
    x = reduce(lambda a, b: op("add", a, b), [Load(f"x{each}", at, BF16) for each in range(streams)])
    shifted = op("exp", op("sub", x, Reduce("max", x, F32)))
    loops = (loop(p0, 64), loop(p1, pixels))
    return Body(loops, (loop(r0, channels),), (Store("y", at, op("div", shifted, total(shifted)), BF16),))


@pytest.mark.parametrize(("channels", "streams", "form"), [(192, 1, "persistent"), (600, 1, "persistent"),
                         (192, 2, "persistent"), (600, 2, "looped"), (5000, 1, "looped")])  # fmt: skip
def test_columns_that_fit_registers_are_read_once(channels: int, streams: int, form: str) -> None:
    tiling = choose(columns(channels, 1024, streams), {})
    assert tiling.form == form
    assert tiling.xblock * BF16.itemsize >= 64


def test_elements_that_only_fill_a_tile_get_no_threads() -> None:
    full, odd = (choose(softmax(2**17, length).body, {}) for length in (2048, 1025))
    assert full.rblock == odd.rblock == 2048
    assert (full.num_warps, odd.num_warps) == (2, 1)


def test_rows_that_are_also_stored_are_in_smaller_tiles() -> None:
    x = Load("x", 512 * p0 + r0, BF16)
    sums = Body((loop(p0, 2**16),), (loop(r0, 512),), (Store("s", p0, Reduce("sum", x, F32), F32),))
    assert choose(sums, {}).xblock == 2 * choose(softmax(2**16, 512).body, {}).xblock


def test_short_columns_are_summed_by_few_threads() -> None:
    tilings = [
        choose(Body((loop(p0, 2**19),), (loop(r0, length),), (Store("s", p0, Reduce("sum", x, F32), F32),)), {})
        for length in (64, 8192)
        for x in (Load("x", 2**19 * r0 + p0, BF16),)
    ]
    assert [tiling.form for tiling in tilings] == ["persistent", "looped"]
    assert [tiling.xblock * tiling.rblock // (32 * tiling.num_warps) for tiling in tilings] == [64, 32]


def test_columns_of_interleaved_pairs_are_reduced_as_columns_and_not_loaded_ahead() -> None:
    pairs = Load("x", 8192 * r0 + 2 * p0, BF16)
    at = 4096 * r0 + p0
    stores = (Store("s", p0, Reduce("sum", pairs, F32), F32), Store("y", at, pairs, BF16))
    for store in (stores, stores[:1]):
        tiling = choose(Body((loop(p0, 4096),), (loop(r0, 8192),), store), {})
        assert (tiling.form, tiling.xblock, tiling.num_stages) == ("split", 64, 0)


def test_a_costly_reduction_of_all_elements_has_more_threads() -> None:
    """16 elements of a thread that each need many registers leave room for one program per multiprocessor."""
    x = Load("x", r0, F32)
    costly = x
    for _ in range(20):
        costly = op("exp", costly)
    plain, many = (
        choose(Body((), (loop(r0, 2**25),), (Store("s", sympy.S.Zero, Reduce("sum", value, F32), F32),)), {})
        for value in (x, costly)
    )
    assert (many.rblock, many.splits) == (2 * plain.rblock, plain.splits)
    assert many.num_warps == plain.num_warps == 16


def test_groups_and_their_channels_are_one_axis_if_a_group_has_too_few_channels() -> None:
    p3 = loop_symbol("p", 3)
    x, scale = Load("x", 1310720 * p0 + 10 * p1 + p2 + 320 * p3, BF16), Load("s", 32 * p0 + p1, F32)
    loops = (loop(p0, 16), loop(p1, 32), loop(p2, 10), loop(p3, 4096))
    body = Body(loops, (), (Store("y", 1310720 * p0 + 40960 * p1 + 4096 * p2 + p3, op("mul", x, scale), BF16),))
    tiling = choose(body, {})
    assert (tiling.x, tiling.y, tiling.grid) == (loops[3:], loops[1:3], loops[:1])
    assert (tiling.xblock, tiling.yblock) == (64, 64)


def test_no_loop_is_in_two_axes_of_a_tile() -> None:
    """`repeat_interleave(2)`: the inner loop is too short for an axis, and the outer one already is an axis."""
    body = Body((loop(p0, 64), loop(p1, 2)), (), (Store("y", 2 * p0 + p1, Load("x", p0, F32), F32),))
    tiling = choose(body, {})
    axes = (*tiling.x, *tiling.y, *tiling.z, *tiling.grid)
    assert sorted(axes, key=str) == sorted(body.loops, key=str)


def test_a_reduction_of_tensors_in_both_orders_has_a_tile_with_whole_sectors_along_both() -> None:
    """Sums over the pixels of a channel, of a product of a channels-last and a channels-first tensor."""
    product = op("mul", Load("x", 64 * r0 + p0, BF16), Load("g", 4096 * p0 + r0, BF16))
    body = Body((loop(p0, 64),), (loop(r0, 4096),), (Store("s", p0, Reduce("sum", product, F32), F32),))
    tiling = choose(body, {})
    assert min(tiling.xblock, tiling.rblock) * BF16.itemsize >= 32


def test_a_thread_gets_no_neighbouring_elements_that_it_cannot_load_together(tmp_path: Path) -> None:
    """Every other row of odd length is not aligned to an access of two elements, so a thread gets one element."""
    row, bias = Load("x", 10747 * p0 + p1, BF16), Load("b", p1, BF16)
    store = Store("y", 10747 * p0 + p1, op("add", row, bias), BF16)
    (kernel,) = compile_source(
        TritonGenerator().generate(Body((loop(p0, 64), loop(p1, 10747)), (), (store,)), "biased"), tmp_path
    )
    assert set(re.findall(r"sizePerThread = \[(\d+)\]", kernel.asm["ttgir"])) == {"1"}


def test_what_depends_on_loops_that_are_constant_in_a_tile_is_loaded_once_for_a_tile() -> None:
    """An adaptive norm's backward took 90 us when each channel loaded the factors of its image, 61 since (one H200)."""
    case = factors_of_batches(16, 512, 2048)
    text = TritonGenerator().generate(case.body, "sums", size_hints=case.sizes).text
    assert re.search(r"p0 = \(tl.program_id\(0\).* \* XBLOCK\) // 2048$", text, re.MULTILINE)
    assert re.search(r"tl.load\(in1 \+ \(512 \* p0 \+ r0\)[,)]", text)


def test_tiles_of_columns_are_smaller_if_many_tensors_are_loaded_ahead() -> None:
    at = 4096 * r0 + p0
    x = [Load(f"x{each}", at, BF16) for each in range(5)]
    value = reduce(lambda a, b: op("add", a, b), x)
    few, many = (
        Body((loop(p0, 4096),), (loop(r0, 8192),), (Store("y", at, load, BF16), Store("s", p0, total(load), F32)))
        for load in (x[0], value)
    )
    assert [choose(body, {}).rblock for body in (few, many)] == [64, 32]
