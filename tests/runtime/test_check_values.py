"""`check_values` and `sync_kernels`: good values pass, and the error for a bad value names the node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overlapc.codegen.python import PythonWrapper
from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.runtime.check_values import ValueCheckError
from tests.codegen.test_program import compiled


def logs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).log().sum(0)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def run(cache: Path, x: torch.Tensor, **options: object) -> torch.Tensor:
    step = torch.compile(logs, backend="overlapc", options={"cache_dir": str(cache), **options})
    return step(x, torch.eye(8))


def test_good_values_pass(cache: Path):
    x = torch.rand(8, 8) + 1
    torch.testing.assert_close(run(cache, x, check_values="nan", sync_kernels=True), logs(x, torch.eye(8)))


@pytest.mark.parametrize(("kind", "value"), [("nan", -1.0), ("inf", 0.0)])
def test_the_node_that_writes_a_bad_value_is_named_with_its_line(cache: Path, kind: str, value: float):
    x = torch.full((8, 8), value) * torch.eye(8)
    if kind == "nan":
        x = torch.full((8, 8), -1.0)
    with pytest.raises(ValueCheckError, match=rf"inference_\d+: \w+ wrote \d+ {kind} of") as error:
        run(cache, x, check_values=kind)
    assert "test_check_values.py" in str(error.value)


def test_without_the_option_values_are_not_checked(cache: Path):
    assert run(cache, torch.full((8, 8), -1.0)).isnan().all()


def test_sync_kernels_synchronizes_after_every_launch():
    program, _, _ = compiled(lambda x: x.sin().sum() + x.mm(x).sum(), torch.randn(4, 4))
    plain = PythonWrapper(program).source
    synced = PythonWrapper(program, checks=frozenset({"sync"})).source
    assert "synchronize" not in plain
    assert synced.count("values.synchronize(") == len(synced.splitlines()) - len(plain.splitlines()) > 1


def test_an_unknown_kind_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="no kind of value named 'nans'; nearest: nan"):
        Config(check_values="nans")
