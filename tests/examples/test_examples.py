"""The examples train as in eager mode, on two gloo ranks that run all of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tests import ROOT
from tests.ranks import values_on_ranks

EXAMPLES = ROOT / "examples"
# train_fsdp, the largest, is run by tests/launch/test_demo.py.
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"common", "train_fsdp"})
STEPS = 4


def trained() -> dict[str, dict[str, Any]]:
    """Return by example the losses with and without overlapc, and overlapc's counters."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    from common import Arguments

    found = {}
    for name in NAMES:
        train = importlib.import_module(name).train
        eager = train(Arguments(steps=STEPS, eager=True))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        losses = train(Arguments(steps=STEPS))
        found[name] = {"eager": eager, "losses": losses, **torch._dynamo.utils.counters["overlapc"]}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return values_on_ranks(trained, 2, timeout_s=200)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_the_losses_of_eager_mode(ranks, name: str):
    for number, seen in enumerate(each[name] for each in ranks):
        ends_here = name != "pipeline" or number == 1  # only the last stage of a pipeline has losses
        assert len(seen["losses"]) == (STEPS if ends_here else 0)
        assert seen["losses"] == pytest.approx(seen["eager"], rel=1e-4)
        assert seen["losses"][-1:] <= seen["losses"][:1]
        assert seen["graphs"] > 0
        assert seen.get("collectives", 0) > 0 or name == "pipeline"  # which shards nothing
