"""`autotune` on ranks that communicate: all ranks choose the same tilings, also if only one has them in its cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

from overlapc.report import record
from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks


def step(x: Tensor) -> Tensor:
    summed = funcol.all_reduce(x.softmax(1), "sum", dist.group.WORLD)
    return summed.exp()


def starts(root: str) -> list[dict[str, Any]]:
    """Compile the step with empty caches, without rank 1's times, with all times cached, and with `transport="copy"`.

    Returns for each of the four compilations the number of tilings timed and the report's summary of tuning.
    """
    import triton

    from overlapc.codegen import cpp, generators
    from overlapc.codegen import triton as ours

    class OnCpu(ours.TritonGenerator):
        device_type = "cpu"

    assert cpp.CppGenerator  # registered first, as it would be later
    generators.register(OnCpu())
    ours.candidates.MOST = 2
    triton.knobs.runtime.interpret = True
    rank = dist.get_rank()
    cache = Path(root) / str(rank)  # ranks share no cache, as on different hosts
    options = {"autotune": True, "cache_dir": str(cache), "warm_start": False, "profile": "cpu-gloo"}
    x = torch.linspace(0, 1 + rank, 12).view(3, 4)
    expected = step(x)
    seen = []
    for start in ("cold", "lost", "there", "by copies"):
        if start == "lost" and rank == 1:
            shutil.rmtree(cache / "tilings")
        # With "copy" a generated kernel sums the ranks' parts, and its source differs by rank.
        transport = "copy" if start == "by copies" else "nccl"
        torch._dynamo.reset()
        record.clear()
        timed = counted("tilings_timed")
        found = torch.compile(
            step, backend="overlapc", options={**options, "rank_timeout": 100, "transport": transport}
        )(x)
        torch.testing.assert_close(found, expected)
        (graph,) = record.report_of_process().steps[0].graphs
        seen.append({"timed": counted("tilings_timed") - timed, "tuned": graph.tuned})
    return seen


def test_ranks_measure_only_missing_times_and_choose_alike(tmp_path: Path):
    first, second = values_on_ranks(starts, 2, str(tmp_path), timeout_s=240)
    assert [each["tuned"] for each in first[:3]] == [
        each["tuned"] for each in second[:3]
    ]  # printed times are equal, too
    measured = [[each["tuned"].split(",")[0] for each in starts] for starts in (first, second)]
    assert measured == [["3 of 3 kernels measured"] * 3 + ["4 of 4 kernels measured"]] * 2
    assert first[0]["timed"] >= 4  # this rank measures two of three kernels in two or more tilings
    assert [each["timed"] for each in first[1:3]] == [0, 0]
    assert min(first[3]["timed"], second[3]["timed"]) >= 2  # the sum's kernel, whose source differs by rank
    assert second[0]["timed"] >= 2
    assert second[1]["timed"] >= 2
    assert second[2]["timed"] == 0
