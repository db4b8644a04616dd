"""Rank agreement between real processes: torchrun, gloo, and the job's own rendezvous store."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from overlapc.agreement.graph_text import GraphText
from overlapc.agreement.rank_agreement import Peers, peers_of
from overlapc.errors import RanksDisagree
from tests.ranks import Outcome, alive, run_on_ranks

TIMEOUT_S = 1.5
LINES = [f"v{i} = aten.mm.default(v{i - 1}, v0) : bf16 2d" for i in range(1, 200)]
TEXT = GraphText(LINES)


def _error_of(action) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(RanksDisagree) as caught:
        action()
    return str(caught.value), time.monotonic() - began


def _scenarios() -> dict:
    """Run all cases of two ranks that agree or disagree in one launch; return what each rank saw."""
    rank, store = dist.get_rank(), distributed_c10d._get_default_store().clone()
    seen: dict = {}

    def pair(name: str) -> Peers:
        return Peers(store, rank, (0, 1), name)

    with peers_of().agreement("forward", 20) as ranks:
        ranks.agree_on_graph(TEXT)
        seen["medians"] = ranks.agree_on_medians({"mm0": 1000.1 * (1 + 2 * rank), "mm1": 7.0})
        ranks.agree_on_order(["ag0", "rs0"])
    seen["same_party"] = peers_of() is peers_of((1, 0))

    other = list(LINES)
    if rank == 1:
        other[120] = other[120].replace("mm", "add")
    seen["graph"] = _error_of(lambda: pair("graph").agreement("forward", 20).agree_on_graph(GraphText(other)))

    pairs = pair("skipped")
    pairs.agreement("forward", 20).agree_on_graph(TEXT)
    if rank == 0:  # rank 1 never compiles the second graph
        seen["skipped"] = _error_of(lambda: pairs.agreement("forward", TIMEOUT_S).agree_on_graph(TEXT))

    seen["label"] = _error_of(lambda: pair("label").agreement(("forward", "backward")[rank], 20).agree_on_graph(TEXT))

    def breaks() -> None:
        with pair("failed").agreement("forward", 20) as ranks:
            if rank == 1:
                raise ValueError("no kernel for aten.frobnicate")
            ranks.agree_on_graph(TEXT)

    if rank == 1:
        with pytest.raises(ValueError, match="frobnicate"):
            breaks()
    else:
        seen["failed"] = _error_of(breaks)
    dist.barrier()
    return seen


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    outcomes = run_on_ranks(_scenarios, 2, timeout_s=60)
    assert [outcome.traceback for outcome in outcomes] == ["", ""]
    return outcomes


def test_agreed_medians_are_bitwise_equal_on_all_ranks(outcomes: list[Outcome]) -> None:
    first, second = (outcome.value["medians"] for outcome in outcomes)
    assert first == second == {"mm0": (1000.1 + 3 * 1000.1) / 2, "mm1": 7.0}


def test_a_process_has_one_peers_object_per_set_of_ranks(outcomes: list[Outcome]) -> None:
    assert all(outcome.value["same_party"] for outcome in outcomes)


def test_an_error_about_different_graphs_names_ranks_and_the_first_difference(outcomes: list[Outcome]) -> None:
    text, seconds = outcomes[0].value["graph"]
    assert text == outcomes[1].value["graph"][0]
    assert "first difference at line 121:" in text
    assert f"rank 0 (1): {LINES[120]}" in text
    assert f"rank 1 (1): {LINES[120].replace('mm', 'add')}" in text
    assert seconds < 5


def test_a_skipped_compilation_is_an_error_within_the_timeout(outcomes: list[Outcome]) -> None:
    text, seconds = outcomes[0].value["skipped"]
    assert text.startswith("rank 1 did not reach compilation 2 (forward), graph within 1.5 s")
    assert "last agreement of all ranks: compilation 1 (forward), graph" in text
    assert TIMEOUT_S <= seconds < TIMEOUT_S + 1


def test_ranks_at_different_points_of_the_program_raise_at_once(outcomes: list[Outcome]) -> None:
    text, seconds = outcomes[1].value["label"]
    assert text == outcomes[0].value["label"][0]
    assert "rank 0: compilation 1 (forward), graph" in text
    assert "rank 1: compilation 1 (backward), graph" in text
    assert seconds < 5


def test_a_rank_that_fails_stops_the_others_at_once(outcomes: list[Outcome]) -> None:
    text, seconds = outcomes[0].value["failed"]
    assert text.startswith("rank 1 failed in compilation 1 (forward): ValueError: no kernel for aten.frobnicate")
    assert seconds < 5


def test_no_process_is_left(outcomes: list[Outcome]) -> None:
    assert not [outcome.pid for outcome in outcomes if alive(outcome.pid)]


def _after_failures_on_one_host() -> dict[str, float]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(dist.get_rank())
    with peers_of().agreement("forward", TIMEOUT_S) as ranks:
        return ranks.agree_on_medians({"mm": 1.0 + dist.get_rank()})


def test_hosts_that_count_different_failures_agree() -> None:
    assert [outcome.value for outcome in run_on_ranks(_after_failures_on_one_host, 2)] == [{"mm": 1.5}] * 2


def _one_never_compiles_at_first() -> tuple[int, dict[str, float]]:
    """In the first attempt rank 1 never compiles; after the elastic restart both ranks do."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with peers_of().agreement("forward", TIMEOUT_S if attempt == 0 else 20) as ranks:
        ranks.agree_on_graph(TEXT)
        if attempt == 0 and dist.get_rank() == 1:
            time.sleep(60)  # stuck elsewhere; the launcher ends it when rank 0 fails
        return attempt, ranks.agree_on_medians({"mm": 1.0 + dist.get_rank()})


def test_a_job_restarted_after_a_disagreement_agrees() -> None:
    began = time.monotonic()
    outcomes = run_on_ranks(_one_never_compiles_at_first, 2, max_restarts=1, timeout_s=90)
    assert [outcome.value for outcome in outcomes] == [(1, {"mm": 1.5})] * 2
    assert time.monotonic() - began < 55  # the launcher ended the stuck rank
    assert not [outcome.pid for outcome in outcomes if alive(outcome.pid)]
