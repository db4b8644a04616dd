"""Which starts of collectives can be merged into one, and the reasons for the others."""

from dataclasses import replace

import pytest
import sympy
import torch

from overlapc.codegen.bucket_payload import merge_starts
from overlapc.fx.comm.exchange import EXCHANGE
from overlapc.ir.ops import Extern, Layout, Provenance, Start, View
from overlapc.runtime.collective_ops import all_gather_bytes_coalesced
from overlapc.schedule.model import Comm

c10d = torch.ops._c10d_functional


def view(name: str, rows: int, dtype: torch.dtype = torch.float32) -> View:
    return View(name, Layout(torch.device("cpu"), dtype, (sympy.Integer(rows),), (sympy.S.One,)))


def gather(name: str, dtype: torch.dtype = torch.float32, group: str = "1") -> Start:
    args = (view(f"{name}_in", 2, dtype), 2, group)
    call = Extern(name, c10d.all_gather_into_tensor.default, args, {}, view(name, 4, dtype), pure=False)
    return Start(name, call, Comm("all_gather", 16, "dp", 2), Provenance((name,)))


def scatter(name: str, reduction: str = "sum", dtype: torch.dtype = torch.float32) -> Start:
    args = (view(f"{name}_in", 4, dtype), reduction, 2, "1")
    call = Extern(name, c10d.reduce_scatter_tensor.default, args, {}, view(name, 2, dtype), pure=False)
    return Start(name, call, Comm("reduce_scatter", 16, "dp", 2))


def reduction(name: str, dtype: torch.dtype) -> Start:
    args = (view(f"{name}_in", 4, dtype), "sum", "1")
    call = Extern(name, c10d.all_reduce.default, args, {}, view(name, 4, dtype), pure=False)
    return Start(name, call, Comm("all_reduce", 16, "dp", 2))


def exchange(name: str, blocks: int) -> Start:
    args = (view(f"{name}_in", 8), 2, "1", blocks)
    call = Extern(name, EXCHANGE, args, {}, view(name, 4), pure=False)
    return Start(name, call, Comm("all_to_all", 16, "dp", 2, via="copy"))


def test_exchanges_by_copies_are_merged_if_they_have_as_many_blocks():
    assert isinstance(merge_starts([exchange("a", 2), exchange("b", 2)]), Start)
    assert merge_starts([exchange("a", 2), exchange("b", 1)]) == "reductions, blocks or process groups differ"


def test_a_merged_start_has_lists_of_inputs_and_outputs_in_order():
    merged = merge_starts([gather("a"), gather("b")])
    assert isinstance(merged, Start)
    assert merged.call.target is c10d.all_gather_into_tensor_coalesced.default
    assert merged.call.args == ([view("a_in", 2), view("b_in", 2)], 2, "1")
    assert [output.buffer for output in merged.outputs] == ["a", "b"]
    assert merged.origin.fx == ("a", "b")


def test_a_merged_start_can_be_merged_again():
    both = merge_starts([gather("a"), gather("b")])
    assert isinstance(both, Start)
    three = merge_starts([both, gather("c")])
    assert isinstance(three, Start)
    assert [each.buffer for each in three.call.args[0]] == ["a_in", "b_in", "c_in"]
    assert [output.buffer for output in three.outputs] == ["a", "b", "c"]


def test_gathers_of_several_dtypes_are_sent_as_bytes():
    mixed = merge_starts([gather("a"), gather("b", torch.bfloat16)])
    assert isinstance(mixed, Start)
    assert mixed.call.target is all_gather_bytes_coalesced
    three = merge_starts([mixed, gather("c")])
    assert isinstance(three, Start)
    assert three.call.target is all_gather_bytes_coalesced
    assert [output.buffer for output in three.outputs] == ["a", "b", "c"]


def test_reduce_scatters_of_several_dtypes_keep_their_dtypes():
    mixed = merge_starts([scatter("a"), scatter("b", dtype=torch.bfloat16)])
    assert isinstance(mixed, Start)
    assert mixed.call.target is c10d.reduce_scatter_tensor_coalesced.default
    assert [each.layout.dtype for each in mixed.call.args[0]] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("starts", "why"),
    [
        ([reduction("a", torch.float32), reduction("b", torch.bfloat16)], "dtypes differ"),
        ([gather("a"), gather("b", group="2")], "reductions, blocks or process groups differ"),
        ([scatter("a"), scatter("b", "avg")], "reductions, blocks or process groups differ"),
        ([gather("a"), scatter("b")], "no coalesced form of _c10d_functional.all_gather_into_tensor.default"),
    ],
)
def test_starts_that_cannot_be_merged_give_a_reason(starts, why):
    assert merge_starts(starts) == why


def test_other_collectives_have_no_coalesced_form():
    start = gather("a")
    other = replace(start, call=replace(start.call, target=c10d.all_to_all_single.default))
    assert merge_starts([other, other]) == "no coalesced form of _c10d_functional.all_to_all_single.default"
