"""benchmarks/random_programs.py without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.parametrize("more", [["--script"], ["--count", "1"]])
def test_programs_for_a_gpu_are_refused_where_there_is_none(more: list[str]) -> None:
    line = [sys.executable, str(ROOT / "benchmarks" / "random_programs.py"), "--device", "cuda", *more]
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(line, env=no_gpu, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--device cuda: there is no GPU" in ended.stderr
