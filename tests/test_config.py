"""How options are parsed, validated and combined from dicts, variables, modes and `Config` objects."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import overlapc  # noqa: F401 - registers the backend
from overlapc.config import Config, describe
from overlapc.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "written", "read"),
    [
        ("memory_budget", "70GiB", 70 * 2**30),
        ("memory_budget", "", None),
        ("passes", "sink_waits, refine", ("sink_waits", "refine")),
        ("passes", "none", ()),
        ("passes", max, (max,)),
        ("warm_start", "off", False),
        ("measure_matmuls", "", None),
        ("dump", "fx,ir", frozenset({"fx", "ir"})),
        ("cache_dir", "~/kernels", Path.home() / "kernels"),
        ("profile", "~/mine.json", str(Path.home() / "mine.json")),
        ("profile", "h200-nvlink", "h200-nvlink"),
        ("profile", "", None),
        ("estimates", "~/record.json", str(Path.home() / "record.json")),
        ("estimates", Path("~/record.json"), str(Path.home() / "record.json")),
        ("estimates", max, max),
        ("overlap_margin", "2", 2.0),
        ("search_effort", "500", 500),
    ],
)
def test_option_values_are_parsed_into_their_types(option: str, written: Any, read: Any) -> None:
    assert getattr(Config(**{option: written}), option) == read


@pytest.mark.parametrize(
    ("option", "written", "message"),
    [
        ("memory_budget", "-1GiB", "memory_budget: "),
        ("memory_budget", "0B", "memory_budget: '0B' is not a positive size"),
        ("warm_start", "maybe", "warm_start: 'maybe' is neither on nor off; write 1 or 0"),
        ("search_effort", "-1", "search_effort: '-1' is not a whole number"),
        ("overlap_margin", 0.5, "overlap_margin: 0.5 is less than 1, the estimate itself"),
        ("peak_increase", "much", "peak_increase: 'much' is not a number"),
        ("rank_timeout", 0, "rank_timeout: 0 is not a positive number of seconds"),
        ("dump", "fusoin", "dump: no stage named 'fusoin'; nearest: fusion"),
        ("dump", True, "dump: True is neither a word nor a list of words"),
        ("safe_communication", [5], "safe_communication: [5] is neither a word nor a list of words"),
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


def test_a_misspelt_variable_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAPC_MEMORY_BUDGIT", "1GiB")
    with pytest.warns(UserWarning, match="no variable named 'OVERLAPC_MEMORY_BUDGIT'; nearest: OVERLAPC_MEMORY_BUDGET"):
        Config.of()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "pool", "wrapper": "fx"}, "memory='pool' needs wrapper='python'"),
        ({"cuda_graphs": True, "wrapper": "fx"}, "cuda_graphs needs wrapper='python'"),
        ({"cuda_graphs": True, "memory": "pool"}, "cuda_graphs needs memory='reuse'"),
        *(
            ({"cuda_graphs": True, check: value}, f"{check} cannot be combined with cuda_graphs")
            for check, value in (("check_values", "nan"), ("check_lifecycle", True), ("sync_kernels", True))
        ),
        (
            {"autotune": True, "autotune_seconds": 60, "rank_timeout": 30},
            "autotune_seconds=60 is not less than rank_timeout",
        ),
    ],
)
def test_options_that_exclude_each_other_are_an_error(options: dict[str, Any], message: str) -> None:
    for option in options:  # each of them alone is valid
        Config(**{option: options[option]})
    with pytest.raises(ConfigError, match=message):
        Config(**options)


def test_a_changed_copy_is_checked_like_any_other() -> None:
    config = Config(passes="none", memory="pool")
    assert dataclasses.replace(config, autotune=True).passes == ()
    with pytest.raises(ConfigError, match="wrapper='python'"):
        dataclasses.replace(config, wrapper="fx")


def test_every_option_says_what_it_is_for() -> None:
    assert all(meaning for _, _, _, meaning in describe())
    assert {name for name, *_ in describe()} == {each.name for each in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("option", "written"),
    [
        *((option, text) for option in ("overlap_margin", "peak_increase", "rank_timeout") for text in ("nan", "inf")),
        *(("overlap_margin", value) for value in (float("nan"), float("inf"), 1e300, 10**400, "9" * 5000, [], "-inf")),
        *(("peak_increase", value) for value in (float("nan"), -0.1, 1e300, None)),
        *(("rank_timeout", value) for value in (1e18, "1e-9", -1)),
        *(("memory_budget", value) for value in ("1e999GiB", float("nan"), float("inf"), 2**70, 10**400, True, [])),
        *(("memory_budget", value) for value in ("nanGiB", "1" * 5000 + "GiB", "1e300GiB")),
        *(("cache_dir", value) for value in ("", None, 3, "\0", "~nobody-of-that-name/x")),
        *((option, value) for option in ("profile", "estimates") for value in (3, "\0", "~nobody-of-that-name/x")),
        ("autotune", "nan"),
        ("passes", 3),
    ],
)
def test_nan_infinite_and_absurd_values_are_an_error_of_one_line(option: str, written: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**{option: written})
    assert str(error.value).startswith(f"{option}: ")
    assert len(str(error.value)) < 300


def test_a_config_takes_options_that_it_does_not_set_from_variables_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAPC_MATMUL", "native")
    monkeypatch.setenv("OVERLAPC_DUMP", "fx")
    config = Config.of(Config(dump="ir"), mode="reduce-overhead")
    assert (config.dump, config.matmul, config.cuda_graphs) == (frozenset({"ir"}), "native", True)
    assert Config.of(Config(cuda_graphs=False), mode="reduce-overhead").cuda_graphs is False
    assert Config.of(config) == config
    assert pickle.loads(pickle.dumps(config)).given == config.given


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, *_ in describe():
        monkeypatch.setenv(f"OVERLAPC_{name.upper()}", "")
    assert Config.of() == Config()
    assert Config.of().cache_dir == Path.home() / ".cache" / "overlapc"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"options": {"overlap_margin": "nan"}},
            "overlap_margin: 'nan' is not a number from 0 to 1000",
        ),
        ({"options": {"memory_bugdet": "1GiB"}}, "no option named 'memory_bugdet'; nearest: memory_budget"),
        ({"options": {"profile": "h200"}}, "no device profile named 'h200'; nearest: h200-nvlink"),
        (
            {"options": {"estimates": "/nowhere.json"}},
            "estimates: cannot read /nowhere.json: No such file",
        ),
        ({"options": {"passes": "sink_wait"}}, "no pass named 'sink_wait'; nearest: sink_waits"),
        ({"options": {"stop_after": "sink_waits:" + "9" * 5000}}, "stop_after='sink_waits:999"),
        ({"options": [1]}, "options=[1]: write a dict, or overlapc.Config(...)"),
        ({"mode": "fast"}, "no mode named 'fast'; known: default, "),
    ],
)
def test_torch_compile_itself_refuses_unusable_options(given: dict[str, Any], message: str) -> None:
    """The error comes from torch.compile, not from the first call of the compiled function, 30 frames deep."""
    with pytest.raises(ConfigError) as error:
        torch.compile(torch.sin, backend="overlapc", **given)
    assert str(error.value).startswith(message)
    torch.compile(torch.sin, backend="eager", options={"overlap_margin": "nan"})  # other backends' options are not read
