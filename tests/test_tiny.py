"""The whole compiler in a few seconds: run this file first, before any slower test."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig
from overlapc.runtime.counters import counted
from tests.no_inductor import no_inductor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.down(F.gelu(self.up(self.norm(x)))), dim=-1).square().mean()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)


def same_step(model: nn.Module, *inputs: torch.Tensor, **options: object) -> None:
    """Assert that loss and gradients of one compiled step equal eager's."""
    expected = model(*inputs)
    expected.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss = torch.compile(model, backend="overlapc", fullgraph=True, options=options)(*inputs)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], msg=lambda text, name=name: f"{name}: {text}")


def test_a_step_equals_eager_and_is_generated():
    same_step(Net(), torch.randn(6, 24))
    assert counted("graphs") == 2
    assert counted("kernels") > 0
    assert counted("fallbacks") == 0


def test_a_llama_step_equals_eager_without_any_part_of_inductor():
    cfg = LlamaConfig.tiny()
    model = Llama(cfg)
    model.reset_parameters()
    tokens = torch.randint(0, cfg.vocab, (2, 16))
    with no_inductor():
        same_step(model, tokens, tokens.roll(-1, 1))
    assert counted("kernels") > 20


@pytest.mark.parametrize("options", [{"fusion": False}, {"native": False}, {"passes": "none"}, {"dump": "none"}])
def test_switching_off_parts_gives_the_same_numbers(options):
    same_step(Net(), torch.randn(3, 24), **options)


def test_without_generated_kernels_every_op_is_a_counted_call():
    same_step(Net(), torch.randn(3, 24), native=False)
    assert counted("kernels") == 0
    assert counted("fallbacks") > 0


def test_the_backend_is_found_without_an_import():
    code = (
        "import sys, torch; x = torch.ones(7); assert 'overlapc' not in sys.modules; "
        "f = torch.compile(lambda x: x.sin() + 1, backend='overlapc'); "
        "assert torch.allclose(f(x), x.sin() + 1); assert 'overlapc' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_options_come_from_a_dict_a_config_or_variables(monkeypatch):
    x = torch.randn(4)
    for options in ({"native": False}, overlapc.Config(native=False)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(torch.sin, backend="overlapc", options=options)(x)
        assert counted("kernels") == 0
    monkeypatch.setenv("OVERLAPC_NATIVE", "0")
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="overlapc")(x)
    assert counted("kernels") == 0
    monkeypatch.delenv("OVERLAPC_NATIVE")
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="overlapc")(x)
    assert counted("kernels") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budgt": 1}, "no option named 'memory_budgt'; nearest: memory_budget"),
        ({"memory_budget": "70 gigs"}, "memory_budget: '70 gigs' is not a size; write it like '70GiB'"),
        ({"memory_budget": -1}, "memory_budget: -1 is not a positive size"),
        ({"dump": "pass"}, "dump: no stage named 'pass'; nearest: passes"),
        ({"rank_timeout": 0}, "rank_timeout: 0 is not a positive number of seconds"),
        ({"passes": "sink_wait"}, "no pass named 'sink_wait'; nearest: sink_waits"),
        ({"profile": "h300"}, "no device profile named 'h300'"),
    ],
)
def test_unusable_options_are_a_config_error_that_names_the_option(options, message):
    with pytest.raises(overlapc.ConfigError) as caught:
        torch.compile(torch.sin, backend="overlapc", options=options)(torch.randn(4))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_misspelt_variable_is_warned_about(monkeypatch):
    monkeypatch.setenv("OVERLAPC_MEMORY_BUDGT", "1GiB")
    with pytest.warns(UserWarning, match="no variable named 'OVERLAPC_MEMORY_BUDGT'; nearest: OVERLAPC_MEMORY_BUDGET"):
        overlapc.Config.of()


def test_modes_of_torch_compile_set_options():
    assert overlapc.Config.of(mode="reduce-overhead") == overlapc.Config.of({"cuda_graphs": True})
    assert overlapc.Config.of({"matmul": "native"}, mode="max-autotune").matmul == "native"
    x = torch.randn(64, 24)
    torch.testing.assert_close(torch.compile(torch.sin, backend="overlapc", mode="max-autotune")(x), x.sin())
    with pytest.raises(overlapc.ConfigError, match="no mode named 'max-tune'; nearest: max-autotune"):
        torch.compile(torch.cos, backend="overlapc", mode="max-tune")(x)


def test_a_budget_that_nothing_fits_is_an_error_before_any_kernel_is_compiled():
    with pytest.raises(overlapc.MemoryBudgetError, match="raise memory_budget") as failed:
        torch.compile(Net(), backend="overlapc", options={"memory_budget": "1KiB"})(torch.randn(64, 24))
    assert failed.value.peak_bytes > 2**10  # Dynamo re-raises the error; it must still carry the graph's peak
    assert counted("kernel_compiles") == 0


def test_a_budget_counts_inputs_of_forward_against_backward():
    x, frozen = torch.randn(2**18, requires_grad=True), torch.randn(2**20)  # 1 and 4 MiB
    for budget in ("5.5MiB", "6.5MiB"):
        torch._dynamo.reset()
        options = {"memory_budget": budget}
        call = torch.compile(lambda x, y: x.sin().sum() + y.sum(), backend="overlapc", options=options)
        loss = call(x, frozen)
        if budget == "6.5MiB":
            loss.backward()
            continue
        with pytest.raises(overlapc.MemoryBudgetError, match=r"leaves 1\.5.* for this graph, but it needs 2"):
            loss.backward()


def test_a_missing_compiler_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(overlapc.ToolchainError, match="no-such-compiler"):
        torch.compile(torch.sin, backend="overlapc", options={"cache_dir": tmp_path})(torch.randn(4))


def test_the_report_shows_what_was_compiled():
    model = Net()
    step = torch.compile(model, backend="overlapc")
    step(torch.randn(6, 24)).backward()
    text = str(overlapc.report(step))
    assert "forward" in text
    assert "backward" in text
    assert "generated" in text
