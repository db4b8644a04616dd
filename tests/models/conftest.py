"""Tests of whole models take minutes, so they run only when named on the command line: pytest tests/models."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("models" in str(argument) for argument in config.invocation_params.args):
        skipped = pytest.mark.skip(reason="takes minutes; runs when named: pytest tests/models")
        for item in items:
            if "tests/models/" in item.nodeid:
                item.add_marker(skipped)
