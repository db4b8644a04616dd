"""Tensors whose communication may be in flight are waited for before they are read, whatever launched it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import values_on_ranks

c10d = torch.ops._c10d_functional
SIZE = 1 << 18  # so large that a read without a wait comes too early


def world() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def into_given_memory(x: Tensor) -> Tensor:
    out = torch.zeros(2 * SIZE)
    c10d.wait_tensor(c10d.all_gather_into_tensor_out(x * 2, 2, world(), out=out))
    return out + 1


def result_of_a_custom_op(x: Tensor) -> Tensor:
    return c10d.wait_tensor(torch.ops.overlapc_in_flight.launch(x, world())) + 1


def wait_that_nobody_reads(x: Tensor) -> Tensor:
    launched = torch.ops.overlapc_in_flight.launch(x, world())
    c10d.wait_tensor(launched)
    return launched + 1


def custom_op_that_hides_its_group(x: Tensor) -> Tensor:
    launched = torch.ops.overlapc_in_flight.hidden(x)
    c10d.wait_tensor(launched)
    return launched + 1


def custom_op_that_changes_its_argument(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    torch.ops.overlapc_in_flight.into(x, world(), out)
    return out + 1


def several_tensors(x: Tensor) -> list[Tensor]:
    return [c10d.wait_tensor(each) for each in c10d.all_reduce_coalesced([x, x[:3] + 1], "sum", world())]


@torch._dynamo.disable
def launched_by_eager_code(x: Tensor) -> Tensor:
    return c10d.all_reduce(x, "sum", world())


def input_of_a_graph(x: Tensor) -> Tensor:
    return c10d.wait_tensor(launched_by_eager_code(x)) + 1


def view_of_an_input(x: Tensor) -> Tensor:
    return c10d.wait_tensor(launched_by_eager_code(x).view(2, -1).t()) + 1


CASES: tuple[Callable[[Tensor], Tensor | list[Tensor]], ...] = (
    *((into_given_memory,) if torch.__version__ >= (2, 13) else ()),  # torch 2.11 refuses to trace it
    result_of_a_custom_op,
    wait_that_nobody_reads,
    custom_op_that_hides_its_group,
    custom_op_that_changes_its_argument,
    several_tensors,
    input_of_a_graph,
    view_of_an_input,
)


def define() -> torch.library.Library:
    library = torch.library.Library("overlapc_in_flight", "DEF")
    ops: dict[str, tuple[str, Callable[..., Tensor | None], Callable[..., Tensor | None]]] = {
        "launch": (
            "(Tensor x, str group_name) -> Tensor",
            lambda x, group_name: c10d.all_reduce(x, "sum", group_name),
            lambda x, group_name: torch.empty_like(x),
        ),
        "hidden": ("(Tensor x) -> Tensor", lambda x: c10d.all_reduce(x, "sum", world()), torch.empty_like),
        "into": (
            "(Tensor x, str group_name, Tensor(a!) out) -> ()",
            lambda x, group_name, out: dist.all_reduce(out.copy_(x)) and None,
            lambda x, group_name, out: None,
        ),
    }
    for name, (schema, run, fake) in ops.items():
        library.define(f"{name}{schema}")
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"overlapc_in_flight::{name}", fake, lib=library)
    return library


def right(transport: str) -> dict[str, bool]:
    library = define()
    x = torch.arange(SIZE) % 7 + float(dist.get_rank())
    found = {}
    for case in CASES:
        want = case(x)
        for checked in (False, True):  # with the check, memory that is freed too early is NaN
            torch._dynamo.reset()
            options = {
                "warm_start": False,
                "rank_timeout": 60.0,
                "transport": transport,
                "check_lifecycle": checked,
            }
            compiled = torch.compile(case, backend="overlapc", options=options)
            compiled(x)  # while it compiles, what eager code launched arrives
            got = compiled(x)
            equal = all(map(torch.equal, got, want)) if isinstance(got, list) else torch.equal(got, want)
            found[case.__name__] = equal and found.get(case.__name__, True)
    library._destroy()
    return found


@pytest.mark.parametrize("transport", ["nccl", "copy"])
def test_what_may_be_in_flight_is_waited_for(transport: str) -> None:
    assert values_on_ranks(right, 2, transport, timeout_s=120) == [{case.__name__: True for case in CASES}] * 2
