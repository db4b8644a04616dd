"""torchtitan on CPU ranks: the recipe of docs/TRAINERS.md compared with a plain run.

Two layers of Llama with selective checkpointing, the chunked loss, bf16 and clipping, as torchtitan configures them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks
from tests.trainers import titan
from tests.trainers.recipes import furthest, needs, recipe

pytestmark = [
    needs("torchtitan"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torchtitan 0.3 needs torch 2.13"),
    pytest.mark.timeout(600),  # seven trainings in one launch, on a machine that may be busy
]

STEPS = 10
SHARDED, PARALLEL, TRACED = "FSDP", "tensor parallel", "graph_trainer"
CASES: dict[str, dict[str, Any]] = {
    SHARDED: {"accumulate": 2},
    PARALLEL: {"tensor_parallel_degree": 2, "steps": 4},
    TRACED: {"steps": 4},
}


def run(folder: str, case: str, ours: bool, resume: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    before = counted("collectives")
    config = titan.configured(folder, resume=resume, **{"steps": STEPS, **CASES[case]})
    if case == TRACED:
        recipe("torchtitan's graph_trainer")
        config = titan.traced(config, "overlapc" if ours else "")
    elif ours:
        config.model_spec.parallelize_fn = recipe("torchtitan")["compiled"](config.model_spec.parallelize_fn)
    logged = titan.train(config)
    return {"logged": logged, "collectives": counted("collectives") - before}


def work(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for case in CASES:
        found[case, "theirs"] = run(f"{folder}/{case}-theirs", case, ours=False, resume=False)
        found[case, "ours"] = run(f"{folder}/{case}-ours", case, ours=True, resume=False)
    found[SHARDED, "resumed"] = run(f"{folder}/{SHARDED}-ours", SHARDED, ours=True, resume=True)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return values_on_ranks(work, 2, str(tmp_path_factory.mktemp("titan")), timeout_s=580, prepare=titan.on_cpus)


@pytest.mark.parametrize("case", CASES)
def test_steps_match_torchtitan_without_overlapc(outcomes: list[dict[tuple[str, str], Any]], case: str):
    for outcome in outcomes:
        theirs, ours = outcome[case, "theirs"], outcome[case, "ours"]
        assert theirs["collectives"] == 0 < ours["collectives"]
        assert len(theirs["logged"]) == CASES[case].get("steps", STEPS)
        for kind in (0, 1):  # losses, norms of gradients
            assert furthest(*([step[kind] for step in run["logged"]] for run in (ours, theirs))) < 2e-3


def test_torchtitan_resumes_from_its_checkpoint(outcomes: list[dict[tuple[str, str], Any]]):
    for outcome in outcomes:
        assert outcome[SHARDED, "resumed"]["logged"] == outcome[SHARDED, "ours"]["logged"][STEPS // 2 :]


def test_a_traced_graphs_collectives_share_launches(outcomes: list[dict[tuple[str, str], Any]]):
    """The collectives of the 21 parameters (two layers of nine, an embedding, a norm and a head) are bucketed."""
    for outcome in outcomes:
        assert outcome[TRACED, "ours"]["collectives"] < 21
