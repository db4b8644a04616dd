"""Cache keys: everything that changes the program compiled from a graph changes its key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.config import Config
from overlapc.fx.comm.labels import ParamLabel
from overlapc.warm.environment import environment_key
from overlapc.warm.fingerprint import NotCacheable, graph_key, user_graph_key

X = torch.ones(4, 6)


def key(function: Callable[..., Any], *inputs: Tensor) -> str:
    """Return the cache key of the function's graph of ATen ops."""
    return graph_key(make_fx(function, tracing_mode="fake")(*inputs))


def _plus(x: Tensor, number: float) -> Tensor:
    return x + torch.tensor(number)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
def test_a_number_in_a_program_is_part_of_the_key(mode: Callable[[], contextlib.AbstractContextManager[Any]]):
    """`x[0] = 2` puts a real tensor with the value 2 into the graph; under a fake mode its value cannot be read."""
    graphs = [make_fx(partial(_plus, number=number))(X) for number in (2.0, 3.0, 2.0)]
    with mode():
        two, three, again = (graph_key(each) for each in graphs)
    assert two == again != three


def test_the_same_graph_has_the_same_key():
    assert key(lambda x: x[1:] * 2, X) == key(lambda x: x[1:] * 2, X.clone())


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x[1:] * 3, X),
        (lambda x: x[1:] * 2.0, X),
        (lambda x: x[1:] + 2, X),
        (lambda x: x[2:] * 2, X),
        (lambda x: x[:-1] * 2, X),
        (lambda x: (x[1:] * 2, x), X),
        (lambda x: x[1:] * 2, X.double()),
        (lambda x: x[1:] * 2, torch.ones(4, 5)),
        (lambda x: x[1:] * 2, torch.ones(6, 4).t()),
        (lambda x: x[1:] * 2, torch.ones(4, 6, dtype=torch.complex64)),
        (lambda x: x[1:] * 2, torch.ones(5, 6)[1:]),
    ],
)
def test_another_graph_has_another_key(function: Callable[[Tensor], Any], x: Tensor):
    assert key(function, x) != key(lambda x: x[1:] * 2, X)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("custom", ParamLabel("layers.0", "layers.0.weight", "dp").as_annotation()),
        ("stack_trace", "model.py:3"),
        ("nn_module_stack", {"L": ("layers.0", nn.Linear)}),
        ("fwd_nn_module_stack", {"L": ("layers.0", nn.Linear)}),
        ("unbacked_bindings", {}),
        ("val", torch.ones(3)),
    ],
)
def test_the_metadata_of_a_node_is_part_of_the_key(name: str, value: Any):
    graph = make_fx(lambda x: x.sin(), tracing_mode="fake")(X)
    before = graph_key(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    node.meta[name] = value
    assert graph_key(graph) != before


def test_attributes_of_a_graph_count_by_their_layout_and_others_are_not_cacheable():
    def carrying(held: Any) -> str:
        root = nn.Module()
        root.held = held
        graph = fx.Graph()
        graph.output(graph.get_attr("held"))
        return graph_key(fx.GraphModule(root, graph))

    assert carrying(torch.zeros(3)) == carrying(torch.ones(3))
    inner = [make_fx(function)(X) for function in (torch.sin, torch.cos)]
    keys = {carrying(held) for held in (torch.zeros(3), torch.zeros(4), *inner)}
    assert len(keys) == 4
    with pytest.raises(NotCacheable, match="holds a dict"):
        carrying({})


def test_a_scalar_tensor_in_a_graph_counts_by_its_value():
    # Kernels for other devices contain the number as a constant, so a cached graph is valid for this number only.
    assert key(lambda x: x * torch.tensor(0.5), X) != key(lambda x: x * torch.tensor(0.25), X)


def user_key(inputs: list[Any], function: Callable[..., Any] = torch.add, **kwargs: Any) -> str:
    """Return the cache key of a graph of one call, as Dynamo captures it."""
    graph = fx.Graph()
    taken = [graph.placeholder(f"x{at}") for at in range(len(inputs))]
    graph.output(graph.call_function(function, (*taken,), kwargs))
    return user_graph_key(fx.GraphModule(nn.Module(), graph), inputs, "step")


def test_a_steps_key_depends_on_its_inputs():
    two = torch.ones(8)
    inputs = [
        [torch.ones(4), torch.ones(4)],
        [two[:4], two[4:]],  # views of one memory
        [torch.ones(4), nn.Parameter(torch.ones(4))],
        [torch.ones(4), torch.ones(4, requires_grad=True)],
        [torch.ones(4), torch.ones(4, requires_grad=True) * 1],  # not a leaf
        [torch.ones(4), two[::2]],
        [torch.ones(4), torch.ones(4).bfloat16()],
    ]
    assert len({user_key(each) for each in inputs}) == len(inputs)
    assert user_key(inputs[0]) != user_key(inputs[0], alpha=2) != user_key(inputs[0], torch.sub)


def test_every_part_of_an_argument_is_part_of_the_key():
    arguments = [
        slice(1, 4),
        slice(2, 4),
        slice(1, 5),
        slice(1, 4, 2),
        [1, 4],
        (1, 4),
        (1, (4,)),
        {"a": 1},
        {"b": 1},
        "1",
        1,
        1.0,
    ]
    arguments += [True, None, 1j, torch.float32, torch.float64, torch.device("cpu"), torch.strided, torch.channels_last]
    keys = {user_key([X], torch.sin, at=each) for each in arguments}
    assert len(keys) == len(arguments)


@torch.library.custom_op("overlapc_tests::mine", mutates_args=())
def mine(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("inputs", "function", "why"),
    [
        ([X], torch.ops.overlapc_tests.mine.default, "is not torch's"),
        ([X], user_key, "is not torch's"),
        ([X], torch.ops.higher_order.cond, "calls cond"),
        ([2], torch.sin, "an input is a int"),
    ],
)
def test_graphs_that_call_foreign_code_are_not_cacheable(inputs: list[Any], function: Callable[..., Any], why: str):
    with pytest.raises(NotCacheable, match=why):
        user_key(inputs, function)


def setting(set_to: Callable[[Any], None], value: Any, before: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context for a switch of torch that has no context manager."""

    @contextlib.contextmanager
    def switched() -> Iterator[None]:
        set_to(value)
        try:
            yield
        finally:
            set_to(before)

    return switched()


SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast dtype": lambda: setting(
        lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16, torch.bfloat16
    ),
    "flash": lambda: setting(torch.backends.cuda.enable_flash_sdp, False, True),
    "memory efficient": lambda: setting(torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    "math": lambda: setting(torch.backends.cuda.enable_math_sdp, False, True),
    "cudnn sdp": lambda: setting(
        torch.backends.cuda.enable_cudnn_sdp,
        not torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "precision": lambda: setting(torch.set_float32_matmul_precision, "high", "highest"),
    "functorch": lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_of_torch_are_part_of_the_key(switch: str):
    config = Config.of({})
    before = environment_key(config)
    with SWITCHES[switch]():
        assert environment_key(config) != before
    assert environment_key(config) == before


def test_inference_mode_and_no_grad_have_different_keys():
    config = Config.of({})
    with torch.no_grad():
        without = environment_key(config)
    with torch.inference_mode():
        assert environment_key(config) != without


@pytest.mark.parametrize("option", ["estimates", "profile"])
def test_a_file_that_an_option_names_counts_by_its_content(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = set()
    for text in ("{}", '{"a": 1}'):
        (tmp_path / "times.json").write_text(text)
        keys |= {environment_key(Config(**{option: path})) for path in ("~/times.json", str(tmp_path / "times.json"))}
    assert len(keys) == 2
