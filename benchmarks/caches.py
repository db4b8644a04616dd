"""Environment variables for a process with its own cache folder: empty for a cold start, filled for a warm start."""

from __future__ import annotations

import os
from pathlib import Path


def environment_with_caches(folder: Path) -> dict[str, str]:
    """Return this process's environment variables, with the caches of overlapc, Inductor and Triton set to `folder`."""
    root = Path(__file__).resolve().parents[1]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", "")))),
        "OVERLAPC_CACHE_DIR": str(folder / "overlapc"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
