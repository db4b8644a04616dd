"""Options as users write them, and what a compilation reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from overlapc.config import Config, describe
from overlapc.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "written", "read"),
    [
        ("memory_budget", "70GiB", 70 * 2**30),
        ("memory_budget", "", None),
        ("passes", "sink_waits, polish", ("sink_waits", "polish")),
        ("passes", "none", ()),
        ("passes", max, (max,)),
        ("warm_start", "off", False),
        ("measure_matmuls", "", None),
        ("dump", "fx,ir", frozenset({"fx", "ir"})),
        ("cache_dir", "~/kernels", Path.home() / "kernels"),
        ("overlap_margin", "2", 2.0),
    ],
)
def test_values_are_read_as_what_they_are(option: str, written: Any, read: Any) -> None:
    assert getattr(Config(**{option: written}), option) == read


@pytest.mark.parametrize(
    ("option", "written", "message"),
    [
        ("memory_budget", "-1GiB", "memory_budget: "),
        ("memory_budget", "0B", "memory_budget: '0B' is not a positive size"),
        ("warm_start", "maybe", "warm_start: 'maybe' is neither on nor off; write 1 or 0"),
        ("overlap_margin", 0.5, "overlap_margin: 0.5 is less than 1, the estimate itself"),
        ("peak_increase", "much", "peak_increase: 'much' is not a number"),
        ("rank_timeout", 0, "rank_timeout: 0 is not a positive number of seconds"),
        ("dump", "fusoin", "dump: no stage named 'fusoin'; nearest: fusion"),
        ("memory", "pol", "memory: no value named 'pol'; nearest: pool"),
        ("memory_bugdet", 1, "no option named 'memory_bugdet'; nearest: memory_budget"),
    ],
)
def test_an_unusable_value_is_an_error_that_names_its_option(option: str, written: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**{option: written})
    assert str(error.value).startswith(message)


def test_options_come_before_variables_and_these_before_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAPC_MATMUL", "native")
    monkeypatch.setenv("OVERLAPC_DUMP", "fx")
    config = Config.of({"dump": "ir"}, mode="max-autotune-no-cudagraphs")
    assert (config.dump, config.matmul, config.autotune) == (frozenset({"ir"}), "native", True)


def test_a_misspelt_variable_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAPC_MEMORY_BUDGIT", "1GiB")
    with pytest.warns(UserWarning, match="no variable named 'OVERLAPC_MEMORY_BUDGIT'; nearest: OVERLAPC_MEMORY_BUDGET"):
        Config.of()


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "pool", "wrapper": "fx"},
        {"cuda_graphs": True, "memory": "pool"},
        {"cuda_graphs": True, "check_values": "nan"},
        {"autotune": True, "autotune_seconds": 60, "rank_timeout": 30},
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Config(**options)


def test_a_changed_copy_is_checked_like_any_other() -> None:
    config = Config(passes="none", memory="pool")
    assert dataclasses.replace(config, autotune=True).passes == ()
    with pytest.raises(ConfigError, match="wrapper='python'"):
        dataclasses.replace(config, wrapper="fx")


def test_every_option_says_what_it_is_for() -> None:
    assert all(meaning for _, _, _, meaning in describe())
    assert {name for name, *_ in describe()} == {each.name for each in dataclasses.fields(Config)}
