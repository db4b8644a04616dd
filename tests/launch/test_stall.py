"""A job that stalls reports each rank's stack and ends."""

from __future__ import annotations

import sys

import pytest

from overlapc.codegen.objects import function_of
from overlapc.launch import stall
from overlapc.launch.torchrun import JobFailed, run_ranks

SCRIPT = """
import os, signal, torch
import torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for number in range(100):
    if number == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    weight.grad = torch.ones(4)
    dist.all_reduce(weight.grad)  # waits for the other rank
    optimizer.step()
"""


def test_a_stopped_rank_ends_the_job_with_the_stacks_of_the_others(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(JobFailed, match="no optimizer step ended within 3 s, after 3 steps") as caught:
        run_ranks((str(script),), 2, tmp_path / "run", watchdog_s=3)
    first, second = str(caught.value).split("rank 1, ")
    assert "dist.all_reduce(weight.grad)  # waits for the other rank" in first
    assert second.startswith("stopped\n  no stack")


def test_a_stack_names_the_compiled_graph_and_its_node():
    found = []
    call = function_of("def call(args):\n    w0 = look()  # waits for ag0\n", "<overlapc forward_3>",
                       {"look": lambda: found.append(stall._graph(sys._getframe()))})  # fmt: skip
    call([])
    assert found == [", in forward_3: w0 = look()  # waits for ag0"]
