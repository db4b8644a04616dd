"""Profiled kernels are classified by name, and their times per step (compute, NCCL, exposed, idle) are added up."""

import pytest

from benchmarks.kernel_spans import PROFILED_STEPS, class_of, kernel_times, longest, times_by_class

SPANS = [
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 0, 4_000_000, 7),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3_000_000, 6_000_000, 9),
    ("triton_poi_fused_mul_silu_0", 8_000_000, 9_000_000, 7),
    ("triton_poi_fused_mul_silu_0", 9_000_000, 10_000_000, 7),
]


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (SPANS[0][0], "matmuls"),
        (SPANS[1][0], "communication"),
        (SPANS[2][0], "generated kernels"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::elementwise_kernel<128, 4>", "eager kernels"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_a_kernel_is_classified_by_its_name(kernel, what):
    assert class_of(kernel) == what


def test_times_are_per_step_and_overlapped_nccl_time_is_not_exposed():
    times = kernel_times(SPANS)
    assert times == {name: ms / PROFILED_STEPS for name, ms in
                     {"compute_ms": 6, "nccl_ms": 3, "exposed_ms": 2, "idle_ms": 2}.items()}  # fmt: skip
    assert times_by_class(SPANS)["generated kernels"] == 2 / PROFILED_STEPS
    assert longest(SPANS, 1) == [(4 / PROFILED_STEPS, 1 / PROFILED_STEPS, SPANS[0][0])]
    assert longest(SPANS, 3)[-1] == (2 / PROFILED_STEPS, 2 / PROFILED_STEPS, "triton_poi_fused_mul_silu_0")
