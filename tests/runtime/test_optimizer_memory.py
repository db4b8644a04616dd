"""What is counted of an optimizer's memory."""

from __future__ import annotations

import torch

from overlapc.runtime.optimizer_memory import LiveBytes, state_bytes


def test_state_without_storage_is_not_counted():
    optimizer = torch.optim.SGD([weight := torch.zeros(3)])
    optimizer.state[weight] = {"mask": torch.eye(3).to_sparse(), "rows": torch.eye(3).to_sparse_csr(), "mean": weight}
    assert state_bytes([optimizer]) == {"SGD": 12}


def test_live_bytes_are_counted_beside_sparse_results():
    with LiveBytes() as live:
        dense = torch.ones(3, 1024)
        dense.to_sparse()
    assert live.peak_bytes >= dense.nbytes
