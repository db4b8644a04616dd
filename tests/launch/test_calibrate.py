"""`overlapc calibrate` from the command line to a profile that loads, on two processes of this machine."""

import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from overlapc.errors import ConfigError
from overlapc.estimators.calibration.clock import clock_for
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.launch import calibrate_host, calibrate_kernels
from overlapc.launch.calibrate import CalibrateConfig, derived, summary
from overlapc.launch.calibrate_host import host_costs, kernel_launch_ns
from overlapc.launch.calibrate_kernels import KERNELS, compile_alone
from overlapc.report import record
from overlapc.schedule.model import Kind
from overlapc.schedule.text import parse
from tests.ranks import values_on_ranks


def test_calibration_writes_a_profile_that_loads(tmp_path):
    out = tmp_path / "here.json"
    done = subprocess.run(
        [sys.executable, "-m", "overlapc.launch.cli", "calibrate", "--quick", "--device", "cpu", "--name", "here",
         "--out", str(out)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "written to" in done.stdout
    profile = load_profile(out)
    assert profile.name == "here"
    assert profile.table("all_gather", 2, "float32") is not None
    assert profile.launch_ns > 0
    assert profile.table("all_to_all via copy", 2) is not None
    assert profile.copy_link is not None
    assert "2 processes on" in profile.origins["memory_bytes_per_s"]


def test_a_summary_shows_factors_and_curves():
    document = {
        "name": "some",
        "origin": "said",
        "quantities": {
            "memory_bytes_per_s": {"value": 4e12},
            "launch_ns": {"value": 2e3},
            "flops_per_s.bf16": {"value": 17.2e9},
            "slowdowns": {
                "value": {"all_gather": {"attention": 1.2, "matmuls": [[1.0, 2.0], [4.0, 1.5], [31.0, 1.24]]}}
            },
        },
        "tables": [{"collective": "all_gather", "ranks": 2, "points": [[2**16, 12345], [2**20, 1], [2**24, 1234e3]]}],
    }
    *_, table, beside = summary(document).splitlines()
    assert table == "all_gather on 2 ranks: 64KiB 12.3 µs, 16MiB 1234 µs"
    assert beside == "compute overlapped with all_gather takes: attention 1.20x, matmuls 1.24 to 2.00x"
    assert "bf16       0.0172 TFLOP/s" in summary(document), "a rate far below 1 TFLOP/s must keep its digits"


@pytest.mark.parametrize("name", KERNELS)
def test_generated_kernels_move_what_they_must(name):
    function, form, tensors = KERNELS[name].function, KERNELS[name].form, KERNELS[name].moves
    x, y = torch.rand(64, 4096), torch.rand(64, 4096)
    weight = torch.ones(4096)
    compiled, moved, _ = compile_alone(function, (x, y, weight))
    (graph,) = record.report_of_process().steps[0].graphs[-1:]
    assert {node.work.form for node in parse(graph.schedule).nodes if node.kind is Kind.KERNEL} == {form}
    for ours, eager in zip(compiled(x, y, weight), function(x, y, weight), strict=True):
        torch.testing.assert_close(ours, eager)
    assert moved == pytest.approx(tensors * x.nbytes, rel=0.3)


def test_a_chain_without_fusion_has_a_launch_for_each_op():
    _, _, launches = compile_alone(calibrate_host._sines, (torch.ones(16),), fusion=False)
    assert launches == calibrate_host._CHAIN


def test_the_kernels_between_which_gaps_are_measured_are_different_kernels():
    compiled, _, launches = compile_alone(calibrate_kernels.unlike, (torch.ones(16),), fusion=False)
    assert launches == len(calibrate_kernels.UNLIKE) == len(set(calibrate_kernels.UNLIKE))
    (graph,) = record.report_of_process().steps[0].graphs[-1:]
    assert graph.kernels == launches
    torch.testing.assert_close(compiled(torch.ones(16))[0], calibrate_kernels.unlike(torch.ones(16))[0])


def host_costs_here():
    clock, device = clock_for(torch.device("cpu")), torch.device("cpu")
    return asdict(host_costs(clock, device, kernel_launch_ns(clock, device)))


def test_host_costs_are_measured_by_kind_of_node():
    """Over gloo, which blocks in each collective, so a collective costs much more host time than a kernel."""
    for costs in values_on_ranks(host_costs_here, 2, timeout_s=120):
        assert costs["kernel"] > 0
        assert costs["call"] > 0
        assert costs["collective"] > 10 * costs["kernel"]
        assert costs["argument"] > 0  # DTensor arguments are unwrapped, and their gradients wrapped


def test_quantities_that_are_derived_are_marked_as_not_measured():
    said = derived(CalibrateConfig(4, "cuda", ranks_per_host=8))({"flops_per_s.bf16": 7e14, "flops_per_s.fp32": 5e13})
    assert said["ranks_per_host"] == (8, "given")
    assert all("not measured" in said[key][1] for key in ("flops_per_s.fp16", "flops_per_s.tf32", "network_link"))


def test_unknown_or_missing_devices_are_an_error():
    with pytest.raises(ConfigError, match="cpu or cuda"):
        CalibrateConfig(2, "tpu").check()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="0 CUDA device"):
            CalibrateConfig(2, "cuda").check()
