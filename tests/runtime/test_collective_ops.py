"""All-gathers and all-reduces over gloo are right, and do not crash gloo's threads, which share operation names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlapc.parallel import fully_shard
from overlapc.runtime.collective_ops import gloo_all_gather, gloo_all_gathers, gloo_all_reduces
from overlapc.runtime.toolchain import find_compiler
from tests.ranks import values_on_ranks

_c10d = torch.ops._c10d_functional
_GATHERED = [(3, 2), (0, 2), (), (5,), (3, 2), ()]


def test_separate_collectives_equal_those_of_torch():
    assert values_on_ranks(_gathers, 2) == [None, None]


def _gathers() -> None:
    """Assert that gathers and reductions of tensors of several dtypes equal the results computed from all ranks'
    inputs."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.complex64, torch.complex64]
    ours = [[torch.arange(7)[: max(1, torch.Size(size).numel())] + each for size in _GATHERED] for each in range(2)]
    tensors = [
        [
            whole[: torch.Size(size).numel()].reshape(size).to(dtype)
            for whole, size, dtype in zip(part, _GATHERED, dtypes, strict=True)
        ]
        for part in ours
    ]
    found = gloo_all_gathers(tensors[rank], 2, group)
    for at, each in enumerate(found):
        parts = [tensors[of][at] for of in range(2)]
        torch.testing.assert_close(
            _c10d.wait_tensor(each), torch.cat([part.reshape(-1, *part.shape[1:]) for part in parts])
        )
    sums = gloo_all_reduces([tensors[rank][0], tensors[rank][3]], "sum", group)
    for at, total in zip((0, 3), sums, strict=True):
        torch.testing.assert_close(_c10d.wait_tensor(total), tensors[0][at] + tensors[1][at])
    one = gloo_all_gather(tensors[rank][0], 2, group)
    torch.testing.assert_close(_c10d.wait_tensor(one), torch.cat([tensors[0][0], tensors[1][0]]))


# gloo's threads copy short operation names with memcpy; this memcpy is so slow that another thread runs in between.
_SLOW = r"""
#include <sys/prctl.h>
#include <string.h>
#include <unistd.h>
void *memcpy(void *to, const void *from, size_t bytes) {
  char thread[17] = "";
  if (bytes == 9 && (!__builtin_memcmp(from, "ALLREDUCE", 9) || !__builtin_memcmp(from, "ALLGATHER", 9))) {
    prctl(PR_GET_NAME, thread);
    if (!strncmp(thread, "pt_gloo", 7)) usleep(2000);
  }
  void *end = to;
  __asm__ volatile("rep movsb" : "+D"(end), "+S"(from), "+c"(bytes) : : "memory");
  return to;
}
"""


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="memcpy in x86-64 assembly")
def test_concurrent_gathers_do_not_corrupt_the_heap(tmp_path: Path):
    """Without `SAFE_OVER_GLOO` both ranks abort: malloc(): unaligned tcache chunk detected."""
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(_SLOW)
    build = [
        *find_compiler().command,
        "-x",
        "c",
        "-O2",
        "-fno-builtin",
        "-fPIC",
        "-shared",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(build, check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"OVERLAPC_CACHE_DIR": str(tmp_path / "cache"), "STORE": str(tmp_path / "store")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.test_collective_ops"],
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


def _many_steps() -> None:
    """Run FSDP steps whose gathers and reductions end at the same time on both of gloo's threads."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = torch.compile(model, backend="overlapc")
    for _ in range(12):
        step(torch.randn(4, 16)).sum().backward()
    dist.destroy_process_group()
    # gloo's threads outlive the process group (in torch 2.13, also in eager programs). If one of them releases its last
    # tensor while the interpreter exits, it requests the GIL, and CPython ends the thread in a way that aborts the
    # process.
    os._exit(0)


if __name__ == "__main__":
    _many_steps()
