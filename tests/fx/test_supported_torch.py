"""The check of torch's version."""

from __future__ import annotations

import pytest
import torch

from overlapc.errors import ConfigError
from overlapc.fx.supported_torch import check_torch_version


def test_this_torch_is_supported():
    assert check_torch_version() == tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.parametrize(
    ("version", "pair"), [("2.11.0+cu130", (2, 11)), ("2.13.2", (2, 13)), ("2.12.0a0+git1", (2, 12))]
)
def test_versions_in_range_are_parsed(version, pair):
    assert check_torch_version(version) == pair


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0", "1.13.1", "nightly"])
def test_versions_out_of_range_raise_with_the_supported_range(version):
    with pytest.raises(ConfigError) as error:
        check_torch_version(version)
    assert str(error.value) == f"torch {version} is not supported: overlapc needs torch>=2.11,<2.14"
