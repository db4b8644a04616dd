"""Commands of a `StreamQueue` in threads that have not used a GPU, such as autograd's when backward is a graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from overlapc.runtime.copies.command_queues import StreamQueue
from overlapc.runtime.copies.commands import Copy, Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda", 0)  # the current device of a new thread: setting it does not make its context current


@pytest.mark.parametrize("made_in", ["main thread", "new thread"])
def test_a_thread_that_has_not_used_a_gpu_runs_copies_and_waits_for_them(tmp_path: Path, made_in: str):
    source = torch.arange(1 << 20, device=DEVICE)
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    queues = [StreamQueue("dp", str, 5.0, DEVICE, tmp_path)] if made_in == "main thread" else []

    def copy() -> StreamQueue:
        queue = queues[0] if queues else StreamQueue("dp", str, 5.0, DEVICE, tmp_path)
        commands = queue.prepared([Copy(target.data_ptr(), source.data_ptr(), source.nbytes)])
        queue.wait(queue.run(commands, Run(0, 0)))
        return queue

    with ThreadPoolExecutor(1) as new_thread:
        queue = new_thread.submit(copy).result()
    assert torch.equal(target, source)  # on the default stream, which waits
    queue.close()
