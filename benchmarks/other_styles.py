"""Capture schedules of steps written in the style of other systems, before any pass, for plan_quality.py.

    python benchmarks/other_styles.py FOLDER [CASE ...]
    python benchmarks/plan_quality.py FOLDER/*.sched --times 10

`dtensors` is FSDP by DTensors alone, as in SimpleFSDP: its graph has no labels, and each parameter is gathered where it
is read. `titan` is tensor and sequence parallelism on one axis and FSDP on the other, as torchtitan sets it up:
hundreds of small collectives that the next kernel waits for. `dtensors_2d` is the same model with both written by
DTensors, as in torchtitan's graph_trainer. `experts` exchanges tokens twice in every layer. All cases are captured
without a GPU on rank 0 of a fake process group, like the corpus (tests/schedules/capture.py), and estimated for H200s.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # models and capture are shared with the tests

from overlapc.launch.llama import Llama, LlamaConfig, tensor_parallel
from tests.parallel.tiny import fsdp_with_dtensors
from tests.schedules.capture import NARROW, Case, capture, experts, fsdp


def dtensors(model: Llama, mesh: DeviceMesh) -> None:
    """Shard `model` with DTensors over `mesh["dp"]`, and before over `mesh["tp"]` if there is one; compute in bf16."""
    if "tp" in (mesh.mesh_dim_names or ()):
        tensor_parallel(model, mesh["tp"])
    fsdp_with_dtensors(model, mesh["dp"], torch.bfloat16)


CASES = {
    "dtensors": Case(LlamaConfig.llama_8b(32, max_seq=2048), {"dp": 16}, dtensors),
    "titan": Case(LlamaConfig.llama_70b(48), {"dp": 16, "tp": 8}, fsdp),
    "dtensors_2d": Case(LlamaConfig.llama_70b(48), {"dp": 16, "tp": 8}, dtensors),
    "experts": Case(replace(NARROW, layers=24), {"dp": 2, "ep": 4}, experts),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write the schedules to")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help="%(default)s")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.cases:
        capture(name, CASES[name], args.folder)


if __name__ == "__main__":
    main()
