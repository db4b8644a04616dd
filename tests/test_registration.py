"""torch finds `backend="overlapc"` whether or not the package is installed, also from several threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo import funcname_cache
from torch._subclasses import fake_tensor

from tests import ROOT

THREADS = """
import sys
{before}
import threading
import importlib.metadata
if {hidden}:
    importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
import torch
{after}
threads, found, errors = [], [], []
together = threading.Barrier(4)

def compile_first():
    together.wait()
    try:
        found.append(torch.compile(torch.sin, backend="overlapc"))
    except BaseException as error:
        errors.append(error)

for _ in range(4):
    threads.append(threading.Thread(target=compile_first))
    threads[-1].start()
for thread in threads:
    thread.join()
assert not errors, errors
assert len(found) == 4
assert "overlapc" in torch._dynamo.list_backends()
from torch._dynamo.backends.registry import lookup_backend
assert len({{lookup_backend("overlapc") for _ in range(2)}}) == 1
"""
DYNAMO = "import torch._dynamo; torch._dynamo.list_backends()"


@pytest.mark.parametrize(
    ("before", "after", "installed"),
    [
        ("", "", True),
        ("import overlapc; assert 'torch' not in sys.modules", "", False),
        ("", f"{DYNAMO}; import overlapc", True),
    ],
    ids=["by its entry point", "not installed", "after torch has looked for backends"],
)
def test_four_threads_that_compile_first_all_find_the_backend(
    before: str, after: str, installed: bool, tmp_path: Path
) -> None:
    program = THREADS.format(before=before, after=after, hidden=not installed)
    (tmp_path / "overlapc.dist-info").mkdir()  # the metadata that installing the package would write
    entry = "[torch_dynamo_backends]\noverlapc = overlapc.backend:overlapc\n"
    (tmp_path / "overlapc.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "overlapc.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: overlapc\nVersion: 0\n")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


ONCE = """
import functools, logging, torch, overlapc

@functools.lru_cache(None)
def warning_once(self, *args):
    self.warning(*args)

@functools.lru_cache(None)
def info_once(self, *args):
    self.info(*args)

logging.Logger.warning_once, logging.Logger.info_once = warning_once, info_once  # as transformers does
logger = logging.getLogger("a model's")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x).relu()
        logger.warning_once("use_cache is ignored")
        return self.inner(x).sum()

model, x = Model(), torch.randn(2, 4)
expected = model(x)
assert torch.equal(torch.compile(model, backend="overlapc", fullgraph=True)(x), expected)
"""


def test_a_message_that_is_logged_once_does_not_break_the_graph(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "OVERLAPC_CACHE_DIR": f"{tmp_path}"}
    ended = subprocess.run(
        [sys.executable, "-c", ONCE], check=True, env=environment, timeout=120, capture_output=True, text=True
    )
    assert "Unexpected exception" not in ended.stderr, "torch 2.11 cannot log functions in its configuration"


def test_fake_tensors_initialize_a_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []
    monkeypatch.setattr(fake_tensor, "init_gpu_context", calls.append)
    torch.compile(torch.sin, backend="overlapc")
    torch.compile(torch.cos, backend="overlapc")
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        for index in (0, 0, 1):
            torch.empty(2, device=torch.device("cuda", index))
    assert calls == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not record where in a line Dynamo is")
def test_dynamo_searches_files_for_function_names_only_if_it_logs_its_trace() -> None:
    found = funcname_cache.cache
    funcname_cache.clearcache()
    torch.compile(lambda x: x.sin(), backend="overlapc")(torch.ones(3))
    assert __file__ not in found
    torch._logging.set_logs(trace_call=True)
    try:
        torch.compile(lambda x: x.cos(), backend="overlapc")(torch.ones(3))
    finally:
        torch._logging.set_logs()
    assert __file__ in found


SHARDED_LATER = """
import torch, torch.distributed as dist
from torch import nn
import overlapc
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return torch.tanh(self.linear(x))
model = nn.Sequential(*(Block() for _ in range(4)))
for block in model:
    block.compile(backend="overlapc", options={"native": "0", "passes": "none"})
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for block in model:
    fully_shard(block)
overlapc.adopt_fsdp2(fully_shard(model))
model(torch.ones(2, 4)).sum().backward()
# The first block has a graph of its own, because its input needs no gradient.
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, torch._dynamo.utils.counters["stats"]
"""


def test_equal_blocks_that_are_compiled_before_they_are_sharded_share_a_graph(tmp_path: Path) -> None:
    """torchtitan and dinov3 compile each block first."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OVERLAPC_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SHARDED_LATER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
