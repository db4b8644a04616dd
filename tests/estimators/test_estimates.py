"""Estimates of compute and collectives from a device profile, and the profiles themselves."""

import json
from dataclasses import replace

import pytest
import torch

from overlapc.errors import ConfigError
from overlapc.estimators.base import FREE, FirstKnown, estimate_schedule
from overlapc.estimators.calibration import quick_profile
from overlapc.estimators.calibration.fit import fit_copies
from overlapc.estimators.device import DeviceProfile, Link, Table
from overlapc.estimators.nccl import AnalyticCollectives, MeasuredCollectives, interpolate
from overlapc.estimators.profiles import this_machine
from overlapc.estimators.profiles.profile_file import PROFILES, load_profile, profile_from_json, profile_to_json
from overlapc.estimators.roofline import Roofline
from overlapc.schedule.model import Comm, Estimate, Kind, Node, Work
from overlapc.schedule.text import parse

MIB = 2**20
H200 = load_profile("h200-nvlink")


def collective(kind, size_bytes, ranks=4, members=()):
    return Node("c", Kind.START, kind, comm=Comm(kind, size_bytes, "dp", ranks, "bf16", members))


def kernel(work, kind=Kind.EXTERN):
    return Node("k", kind, "k", work=work)


def test_the_roofline_is_the_slower_of_arithmetic_and_memory():
    roofline = Roofline(DeviceProfile("d", {"bf16": 1e12, "vector": 1e11}, 1e9))
    assert roofline.estimate(kernel(Work(10**9, 500, 500, "bf16"))) == Estimate(1e6, "roofline d")
    assert roofline.estimate(kernel(Work(10**9, 3 * 10**6, 10**6, "torch.bfloat16"))).ns == 4e6
    assert (
        roofline.estimate(kernel(Work(10**9, 0, 0, "bf16"), Kind.KERNEL)).ns == 1e7
    )  # generated kernels do not use tensor cores


def test_unknown_work_has_no_estimate():
    roofline = Roofline(DeviceProfile("d", {"bf16": 1e12}, 1e9, kernel_floor_ns=5.0))
    assert roofline.estimate(kernel(None)) is None
    assert roofline.estimate(kernel(Work(5, 0, 0, "int4"))) is None
    assert Roofline(DeviceProfile("d")).estimate(kernel(Work(0, 1))) is None
    assert roofline.estimate(kernel(Work())).ns == 5.0


def test_a_matmul_is_estimated_as_measured_on_an_h200():
    """Under the load of a training step, 4096x4096x14336 in bf16 took 716 us (benchmarks/clock.py on an H200)."""
    flops = 2 * 4096 * 4096 * 14336
    assert Roofline(H200).estimate(kernel(Work(flops, dtype="bf16"))).ns == pytest.approx(716e3, rel=0.02)


def test_work_is_priced_at_the_rate_that_its_size_achieves():
    curves = {
        "matmul.bf16": ((100, 1e9), (10_000, 3e9)),
        "attention_backward.bf16": ((1, 5e8),),
        "generated": ((8, 4e9),),
    }
    profile = DeviceProfile("d", {"bf16": 9e9}, 2e9, curves=curves)
    roofline = Roofline(profile)

    def ns(flops, op):
        return roofline.estimate(Node("n", Kind.EXTERN, op, work=Work(flops, dtype="bfloat16"))).ns

    assert [ns(flops, "mm") for flops in (10, 100, 10_000, 10**6)] == pytest.approx([10, 100, 10_000 / 3, 10**6 / 3])
    assert ns(1000, "mm") == pytest.approx(1000 / 2)  # half way between the points, by the logarithm
    assert ns(1000, "_scaled_dot_product_flash_attention_backward") == pytest.approx(2000)
    assert ns(1000, "_scaled_dot_product_flash_attention") == pytest.approx(1000 / 9)  # no curve: the peak rate
    assert roofline.estimate(kernel(Work(0, 300, 100), Kind.KERNEL)).ns == pytest.approx(100)
    assert roofline.estimate(kernel(Work(0, 300, 100), Kind.EXTERN)).ns == pytest.approx(200)  # not a generated kernel


def test_generated_kernels_are_estimated_by_size_and_form():
    curves = {"generated": ((1000, 1e9), (3000, 2e9)), "generated.rows": ((1000, 5e8),)}
    roofline = Roofline(DeviceProfile("d", memory_bytes_per_s=9e9, curves=curves))

    def ns(size, form=""):
        return roofline.estimate(kernel(Work(0, size, 0, form=form), Kind.KERNEL)).ns

    assert [ns(size) for size in (10, 1000, 2000, 3000, 6000)] == pytest.approx([1000, 1000, 1250, 1500, 3000])
    assert ns(1000, "rows") == pytest.approx(2000)
    assert ns(1000, "columns") == pytest.approx(1000)  # not measured: the curve of element-wise kernels


def test_a_table_of_the_dtype_is_preferred():
    tables = (Table("all_gather", 4, ((1, 5.0),), "fp32"), Table("all_gather", 4, ((1, 7.0),), "bf16"))
    profile = DeviceProfile("d", tables=tables, ranks_per_host=8)
    assert profile.table("all_gather", 4, "bfloat16").points == ((1, 7.0),)
    assert profile.table("all_gather", 4, "int64").points == ((1, 5.0),)
    assert profile.table("all_gather", 2, "float32") is None


@pytest.mark.parametrize("name", ["a100", "b200"])
def test_datasheet_profiles_say_that_they_were_not_measured(name):
    profile = load_profile(name)
    assert "not measured" in profile.origins[""]
    assert AnalyticCollectives(profile).estimate(collective("all_gather", 256 * MIB)).ns > 0


def test_tables_are_interpolated_and_precede_the_analytic_model():
    chain = FirstKnown((MeasuredCollectives(H200), AnalyticCollectives(H200)))
    points = dict(H200.table("all_gather", 4, "bf16").points)
    between = (points[64 * MIB] + points[256 * MIB]) / 2
    assert chain.estimate(collective("all_gather", 256 * MIB)) == Estimate(points[256 * MIB], "table h200-nvlink")
    assert chain.estimate(collective("all_gather", 160 * MIB)).ns == pytest.approx(between, rel=1e-4)
    assert chain.estimate(collective("all_gather", 256 * MIB, ranks=8)).source == "analytic h200-nvlink"
    assert chain.estimate(collective("all_gather", 256 * MIB, members=(0, 8, 16, 24))).source.startswith("analytic")


def test_sizes_outside_of_a_table_are_extrapolated():
    table = Table("all_gather", 2, ((10, 5.0), (20, 7.0), (40, 17.0)))
    assert [interpolate(table, size) for size in (1, 10, 15, 30, 60)] == [5.0, 5.0, 6.0, 12.0, 27.0]
    assert interpolate(Table("all_gather", 2, ((10, 5.0),)), 20) == 10.0


def test_times_that_decrease_at_the_end_of_a_table_are_extrapolated_at_the_rate_of_the_last_point():
    table = Table("all_gather via copy", 2, ((10, 4.0), (20, 12.0), (40, 8.0)))
    assert [interpolate(table, size) for size in (40, 80, 4000)] == [8.0, 16.0, 800.0]
    assert fit_copies([table]).bytes_per_s == pytest.approx(20 / 8e-9)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_the_analytic_model_is_near_the_measurements(kind, ranks):
    """Within 25% from 1 MiB to 1 GiB, in bf16 as in fp32."""
    tables = [t for t in H200.tables if (t.collective, t.ranks) == (kind, ranks)]
    assert {t.dtype for t in tables} == {"bf16", "fp32"}
    for table in tables:
        for size_bytes, measured in table.points:
            if size_bytes >= MIB:
                said = AnalyticCollectives(H200).estimate(collective(kind, size_bytes, ranks)).ns
                assert said == pytest.approx(measured, rel=0.25), (table.dtype, size_bytes)


def test_collectives_on_few_channels_take_longer():
    """512 MiB on 4 H200s take 1.13 to 1.16 times as long on 16 channels as on NCCL's default number."""
    chain = FirstKnown((MeasuredCollectives(H200), AnalyticCollectives(H200)))
    whole = collective("all_gather", 512 * MIB)
    thrifty = replace(whole, comm=replace(whole.comm, channels=16))
    assert chain.estimate(thrifty).ns / chain.estimate(whole).ns == pytest.approx(1.145, rel=0.02)
    unmeasured = replace(whole, comm=replace(whole.comm, channels=14))
    assert chain.estimate(unmeasured) == chain.estimate(thrifty)  # the nearest measured number of channels


def test_every_kind_of_collective_moves_its_own_share_of_bytes():
    profile = DeviceProfile("d", host_link=Link(1e9, 0.0), ranks_per_host=8)
    ns = {
        kind: AnalyticCollectives(profile).estimate(collective(kind, 4000)).ns
        for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "point_to_point")
    }
    assert ns == {
        "all_gather": 3000, "reduce_scatter": 3000, "all_to_all": 3000, "all_reduce": 6000, "broadcast": 4000,
        "point_to_point": 4000,
    }  # fmt: skip


def test_the_ranks_of_a_group_decide_its_links():
    def ns(members):
        return AnalyticCollectives(H200).estimate(collective("all_gather", 1024 * MIB, len(members), members)).ns

    one_host, one_a_host = ns((0, 1, 2, 3)), ns((0, 8, 16, 24))
    assert one_a_host > 5 * one_host
    assert ns((0, 1, 2, 3, 8, 9, 10, 11)) < one_a_host  # four GPUs per host
    unknown = AnalyticCollectives(H200).estimate(collective("all_gather", 1024 * MIB, 16)).ns
    assert unknown == ns(tuple(range(16)))


def test_unknown_collectives_group_sizes_and_links_have_no_estimate():
    assert AnalyticCollectives(H200).estimate(collective("unknown", 5)) is None
    assert AnalyticCollectives(H200).estimate(collective("all_gather", 5, ranks=0)) is None
    assert AnalyticCollectives(DeviceProfile("d")).estimate(collective("all_gather", 5)) is None
    assert AnalyticCollectives(H200).estimate(kernel(Work())) is None


def test_small_all_reduces_of_many_ranks_use_a_tree():
    profile = DeviceProfile("d", host_link=Link(1e12, 1000.0), ranks_per_host=1024)
    assert AnalyticCollectives(profile).estimate(collective("all_reduce", 8, 256)).ns == pytest.approx(16000, rel=1e-3)


def test_nodes_are_estimated_unless_they_are_unknown_or_have_a_time():
    schedule = parse("""
        g = all_gather(p) @dp(4) : 256MiB; w = wait(g); k = kernel(w) read=4KiB : 4KiB
        m = extern(k); given = kernel(k) flops=1 : 1B 77ns
    """)
    chain = FirstKnown((Roofline(H200), MeasuredCollectives(H200)))
    done = estimate_schedule(schedule, chain)
    assert [node.name for node in done.nodes if node.estimate is None] == ["m"]
    assert done.node("w").estimate == FREE
    assert done.node("g").estimate.source == "table h200-nvlink"
    assert done.node("given").estimate.ns == 77
    assert chain.estimate(schedule.node("given")).ns == H200.kernel_floor_ns


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.json")))
def test_profiles_name_their_origins_and_survive_saving(name):
    profile = load_profile(name)
    assert profile.name == name
    data = json.loads((PROFILES / f"{name}.json").read_text())
    assert all(entry["origin"] for entry in data["quantities"].values())
    assert profile_from_json(profile_to_json(profile)) == profile


def test_unknown_missing_and_malformed_profiles_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="no device profile named 'h200'; nearest: h200-nvlink, b200"):
        load_profile("h200")
    with pytest.raises(ConfigError, match="No such file"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"name": "x", "quantities": {"launch": {"value": 1, "origin": "o"}}}')
    with pytest.raises(ConfigError, match="not in the expected form"):
        load_profile(tmp_path / "bad.json")


def test_this_machine_is_measured_once_and_cached(tmp_path):
    profile = this_machine.profile_for("cpu", tmp_path)
    assert profile.memory_bytes_per_s > 1e8
    assert profile.rate("torch.float32") > 1e8
    assert profile.origins[""].startswith("measured: 2 processes")
    (kept,) = (tmp_path / "profiles").rglob("*.json")
    stamp = kept.stat().st_mtime_ns
    assert this_machine.profile_for("cpu", tmp_path) == profile
    assert kept.stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [
        ("NVIDIA H200", "h200-nvlink"),
        ("NVIDIA H100 80GB HBM3", "h100-nvlink"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA L40S", "h200-nvlink"),
    ],
)
def test_gpus_use_the_stored_profile_of_their_kind(tmp_path, monkeypatch, gpu, profile):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert this_machine.profile_for("cuda", tmp_path) == load_profile(profile)
    assert this_machine.stored_profile("cuda") == load_profile(profile)


def test_without_a_gpu_cuda_devices_are_planned_as_h200s(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert this_machine.profile_for("cuda", tmp_path) == H200


@pytest.mark.parametrize("left", ["", '{"name": "x", "quantit', "\x00\x01", "{}"])
def test_a_damaged_cached_profile_is_measured_again(tmp_path, monkeypatch, left):
    whole = json.loads((PROFILES / "cpu-gloo.json").read_text())
    monkeypatch.setattr(quick_profile, "measure", lambda: whole)
    assert this_machine.profile_for("cpu", tmp_path) == load_profile("cpu-gloo")
    (kept,) = (tmp_path / "profiles").rglob("*.json")
    kept.write_text(left)
    assert this_machine.profile_for("cpu", tmp_path) == load_profile("cpu-gloo")
    assert json.loads(kept.read_text()) == whole


def test_without_a_writable_cache_the_default_profile_is_used(tmp_path):
    (tmp_path / "file").write_text("")
    assert this_machine.profile_for("cpu", tmp_path / "file" / "cache") == load_profile("cpu-gloo")
