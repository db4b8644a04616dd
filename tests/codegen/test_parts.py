"""Where a program is cut for CUDA graphs and why, and that its parts together compute what the program computes.

Programs are compiled for the CPU and split as if it could capture; `Repeated` replays a part by running it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from overlapc.codegen.generators import generator_for
from overlapc.codegen.objects import rebuild, text_of
from overlapc.codegen.parts import LEAST_NODES, CapturedPart, Partition, split
from overlapc.codegen.program import Call, Launch, Program, Return, WaitFor
from overlapc.codegen.python import PythonWrapper
from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.ir.ops import Extern, Layout, View, Wait
from overlapc.report import record
from overlapc.runtime.counters import counted
from overlapc.runtime.cuda_graphs import Parts
from overlapc.runtime.support import offset_of, owned
from tests.codegen.test_program import compiled
from tests.runtime.repeated import Repeated
from tests.warm.test_warm import Block


def reasons(partition: Partition) -> dict[str, str]:
    return {cut.node: cut.reason for cut in partition.cuts}


def nodes(partition: Partition) -> list[list[str]]:
    """Return the names of the nodes of each part."""
    return [[item.op.name for item in part.instructions if isinstance(item, Launch | Call)] for part in partition.parts]


def bound(program: Program, partition: Partition, recorder: Repeated) -> Callable[[list[Any]], tuple[Any, ...]]:
    wrapper = PythonWrapper(program, partition=partition)
    wrapper.objects["Parts"] = functools.partial(Parts, recorder=recorder)
    return wrapper.function(generator_for("cpu").load(program.kernels(), Config.of({}).cache_dir))


def straight(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = (x @ w).sin()
    b = (a @ w).cos()
    return b @ a, a


def cut_in_the_middle(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = ((x @ w).sin() @ w).cos()
    values, _ = torch.linalg.eigh(a @ a.t())
    b = ((a * values).exp() @ w).sin()
    return b @ a, a


INPUTS = (torch.randn(16, 16), torch.randn(16, 16))


def test_a_program_of_kernels_and_products_is_one_part():
    program, _, _ = compiled(straight, *INPUTS)
    partition = split(program, "cpu")
    (part,) = partition.parts
    assert part.inputs == program.inputs
    assert set(partition.leaving) == set(part.outputs)
    assert not partition.cuts
    assert partition.summary() == "1 captured part of 5 nodes"
    assert isinstance(partition.steps[-1], Return)


def test_a_call_that_may_synchronize_is_outside_of_parts_and_the_summary_says_why():
    program, _, _ = compiled(cut_in_the_middle, *INPUTS)
    partition = split(program, "cpu")
    first, second = nodes(partition)
    cut = reasons(partition)
    assert list(cut.values()) == ["not known to be free of synchronization"]
    assert first[0].startswith("mm")
    assert set(first) & set(cut) == set(second) & set(cut) == set()
    assert len([*first, *second, *cut]) == len([i for i in program.instructions if isinstance(i, Launch | Call)])
    a = set(partition.parts[0].outputs) & set(partition.parts[1].inputs)
    assert a, "the second part reads what the first made"
    assert a <= partition.parts[1].inner
    assert "2 captured parts" in partition.summary()
    assert "1 x not known to be free of synchronization (_linalg_eigh" in partition.summary()


def test_random_numbers_and_results_of_unknown_size_are_not_captured():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.bernoulli(x), x.sin().sort()[0]

    program, _, _ = compiled(function, torch.rand(8))
    found = reasons(split(program, "cpu"))
    assert "draws random numbers from torch's generator" in found.values()
    assert any(reason.startswith(f"fewer than {LEAST_NODES}") for reason in found.values())


def test_nothing_is_captured_of_a_program_for_another_device():
    program, _, call = compiled(straight, *INPUTS)
    partition = split(program)
    assert not partition.parts
    assert reasons(partition) == {"test": "nothing runs on cuda"}
    again = bound(program, partition, Repeated())
    assert all(torch.equal(a, b) for a, b in zip(again(list(INPUTS)), call(list(INPUTS)), strict=True))


@pytest.mark.parametrize("function", [straight, cut_in_the_middle])
@pytest.mark.parametrize("fused", [False, True])
def test_parts_compute_what_the_program_computes_and_do_not_change_earlier_results(
    function: Callable[..., Any], fused: bool
):
    program, _, call = compiled(function, *INPUTS, fused=fused)
    recorder = Repeated()
    partition = split(program, "cpu")
    parted = bound(program, partition, recorder)
    w = INPUTS[1]
    seen = []
    recaptured = counted("cuda_graph_recaptures")
    for step in range(5):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
        seen.append((parted([x, w]), call([x, w])))
    # The result of a call outside of parts may change its address; a part that reads it is recaptured at most once,
    # because the result is copied from then on.
    recaptured = counted("cuda_graph_recaptures") - recaptured
    assert recaptured <= 1
    assert recorder.recorded == len(partition.parts) + recaptured
    assert recorder.replays == 4 * len(partition.parts)
    for results, expected in seen:  # results of earlier steps must not have changed
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def test_an_input_that_the_graph_changes_may_have_another_address_in_each_call():
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = ((x @ w).sin() @ w).cos() @ w
        x.copy_(y)
        return y

    program, _, call = compiled(function, *INPUTS)
    partition = split(program, "cpu")
    parted = bound(program, partition, Repeated())
    assert partition.parts[0].written == {program.inputs[0]}
    kept = []
    for step in range(4):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
        ours, theirs = x.clone(), x.clone()
        kept.append(x)
        parted([ours, INPUTS[1]])
        call([theirs, INPUTS[1]])
        assert torch.equal(ours, theirs)


def test_the_wrapper_names_the_objects_that_a_later_process_needs():
    program, _, _ = compiled(cut_in_the_middle, *INPUTS)
    wrapper = PythonWrapper(program, partition=split(program, "cpu"))
    assert "@parts.part(inner=[" in wrapper.source
    assert rebuild(wrapper.texts["Parts"]) is Parts
    marked = PythonWrapper(program, marked=True)
    shared = set(wrapper.objects) & set(marked.objects)
    assert all(wrapper.objects[name] is marked.objects[name] for name in shared), "names mean the same in both"


# --- collectives, by programs as text: `g` starts, `w` waits, `m` multiplies, `!` cannot be captured


def written(text: str) -> Program:
    """Return the program of a text such as `g0 m m w0 ! m`: one node per word, all of which read the input `x`."""
    layout = Layout(torch.device("cpu"), torch.float32, (sympy.Integer(4),) * 2, (sympy.Integer(4), sympy.Integer(1)))
    x = View("x", layout)
    instructions: list[Any] = []
    names = ["x"]
    for at, word in enumerate(text.split()):
        name = f"{word}_{at}" if word in ("m", "!") else word
        view = View(name, layout)
        if word[0] == "w":
            source = View(f"g{word[1:]}", layout)
            instructions.append(WaitFor(source.buffer, Wait(name, source, view)))
            continue
        target = {"g": torch.ops._c10d_functional.all_reduce.default, "!": torch.ops.aten.linalg_inv_ex.default}
        op = Extern(name, target.get(word[0], torch.ops.aten.mm.default), (x, x), {}, view)
        instructions.append(Call(op, ((name, ()),), starts=word[0] == "g"))
        names.append(name)
    instructions.append(Return((x,)))
    return Program("test", ("x",), tuple(instructions), {n: n for n in names}, dict.fromkeys(names, layout), {})


def shape(text: str, takes: bool = True) -> str:
    """Split the program of `text`; return its words with brackets around captured parts."""
    words = []
    for step in split(written(text), "cpu", lambda op: takes).steps:
        held = step.instructions if isinstance(step, CapturedPart) else (step,)
        inner = " ".join(i.op.name.split("_")[0] for i in held if isinstance(i, Call | WaitFor))
        words.append(f"[{inner}]" if isinstance(step, CapturedPart) else inner)
    return " ".join(words).strip()


@pytest.mark.parametrize(
    "parted",
    [
        "[g0 m m w0 m]",
        "[m m m m] ! [m m m m]",
        "[g0 m m w0] ! [g1 m m w1]",
        "m g0 ! w0 m",  # g0 is in flight across the cut, and the rest is too short for parts
        "[m m m m] g0 [m m m m] ! [m m m m] w0 [m m m m]",
        "[m m m m] g0 [m m m m] g1 [m m m m] w0 ! [m m m m] w1 [m m m m]",  # g1 is cut while g0 is in flight
        "[m m m m] g0 [m m g1 w1] ! w0 [m m m m]",  # g1 and w1 are in one part while g0 is in flight
    ],
)
def test_a_collective_is_launched_and_waited_for_in_one_part_or_outside(parted: str):
    assert shape(parted.replace("[", "").replace("]", "")) == parted


def test_the_reason_for_a_collective_in_flight_across_a_cut_names_the_cut():
    found = reasons(split(written("m m m m g0 m m m m ! m m m m w0 m m m m"), "cpu", lambda op: True))
    assert found["g0"] == found["w0"] == "in flight across the cut at !_9"


def test_collectives_that_a_capture_cannot_hold_stay_outside_with_their_waits():
    assert shape("m m m m g0 m m m m w0 m m m m", takes=False) == "[m m m m] g0 [m m m m] w0 [m m m m]"
    found = reasons(split(written("g0 w0 m m m m"), "cpu", lambda op: False))
    assert found == {
        "g0": "its process group does not run on NCCL",
        "w0": "its collective is launched outside of a part",
    }


def test_without_a_gpu_the_option_changes_nothing_and_the_report_says_so():
    record.clear()
    torch._dynamo.reset()
    x, w = INPUTS
    results = torch.compile(straight, backend="overlapc", options={"cuda_graphs": True})(x, w)
    for result, expected in zip(results, straight(x, w), strict=True):
        torch.testing.assert_close(result, expected)
    assert "CUDA graphs  0 captured parts of 0 nodes; outside: 1 x nothing runs on cuda" in str(
        record.report_of_process()
    )


def test_training_steps_in_parts_equal_plain_steps_also_from_the_cache(cache: Path, monkeypatch: Any):
    """Runs forward and backward through torch.compile, with the CPU as the device that captures."""
    monkeypatch.setattr("overlapc.compilation.stages.split", functools.partial(split, device_type="cpu"))
    monkeypatch.setattr("overlapc.runtime.cuda_graphs.CudaGraphs", Repeated)

    def steps(graphs: bool) -> list[list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Block()
        options = {"cuda_graphs": graphs, "cache_dir": str(cache), "fusion": False, "warm_start": True}
        run = torch.compile(model, backend="overlapc", options=options)
        found = []
        for step in range(5):
            loss = run(torch.randn(8, 16, generator=torch.Generator().manual_seed(step)))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            found.append([loss, *gradients])
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.1)
        return found

    plain = steps(graphs=False)
    for start in ("cold", "warm"):
        before = {name: counted(name) for name in ("cuda_graph_captures", "cuda_graph_replays", "steps_from_cache")}
        for ours, theirs in zip(steps(graphs=True), plain, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert counted("cuda_graph_captures") >= before["cuda_graph_captures"] + 2, "forward and backward"
        assert counted("cuda_graph_replays") >= before["cuda_graph_replays"] + 2
        assert counted("steps_from_cache") == before["steps_from_cache"] + (start == "warm")


@pytest.mark.parametrize(
    "other",
    [{"wrapper": "fx"}, {"memory": "pool"}, {"check_lifecycle": True}, {"check_values": "nan"}, {"sync_kernels": True}],
)
def test_options_that_cannot_be_combined_with_cuda_graphs_are_errors(other: dict[str, Any]):
    with pytest.raises(ConfigError, match="cuda_graphs"):
        Config(cuda_graphs=True, **other)


@pytest.mark.parametrize("make", [owned, offset_of])
def test_calls_that_wrap_an_op_are_found_again(make):
    x = torch.arange(12.0).view(3, 4)
    call, again = make(torch.ops.aten.slice.Tensor), rebuild(text_of(make(torch.ops.aten.slice.Tensor)))
    torch.testing.assert_close(again(x, 0, 1), call(x, 0, 1))
