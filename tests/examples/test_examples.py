"""Examples train as they do eagerly: on two gloo ranks, in one launch."""

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
    """By example: losses with overlapc and without, and what was compiled."""
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
def test_it_trains_as_it_does_eagerly(ranks, name: str):
    for number, seen in enumerate(each[name] for each in ranks):
        ends_here = name != "pipeline" or number == 1  # the last stage has the losses
        assert len(seen["losses"]) == (STEPS if ends_here else 0)
        assert seen["losses"] == pytest.approx(seen["eager"], rel=1e-4)
        assert seen["losses"][-1:] <= seen["losses"][:1]
        assert seen["graphs"] > 0
        assert seen.get("collectives", 0) > 0 or name == "pipeline"  # whose two ranks shard nothing
