"""Rank agreement between threads that share a store, without a process group."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

from overlapc.agreement import rank_agreement
from overlapc.agreement.graph_text import GraphText
from overlapc.agreement.meeting import format_ranks
from overlapc.agreement.rank_agreement import ComparedGraphs, Peers
from overlapc.errors import RanksDisagree

LINES = [f"v{i} = aten.mm.default(v{i - 1}, v0) : bf16 2d" for i in range(1, 100)]
TEXT = GraphText(LINES)
EQUAL = ComparedGraphs()


def on_ranks(count: int, work: Callable[[Peers, int], Any], store: dist.Store | None = None, run: str = "") -> list:
    """Run `work(peers, rank)` of every rank in its own thread; return the results, or the errors that they raised."""
    shared = store or dist.HashStore()

    def one(rank: int) -> Any:
        try:
            return work(Peers(shared, rank, range(count), run), rank)
        except (RanksDisagree, ValueError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def one_text(outcomes: list) -> str:
    """Return the text of the error, which must be the same on all ranks."""
    assert all(isinstance(outcome, RanksDisagree) for outcome in outcomes)
    (text,) = {str(outcome) for outcome in outcomes}
    return text


def test_ranks_with_equal_contents_agree_and_leave_nothing_in_the_store() -> None:
    store = dist.HashStore()
    before = store.num_keys()

    def work(peers: Peers, rank: int) -> dict[str, float]:
        for label in ("forward", "backward"):
            with peers.agreement(label, 20) as ranks:
                ranks.agree_on_graph(TEXT)
                medians = ranks.agree_on_medians({"a": rank, "b": 0.1 * rank})
                ranks.agree_on_order(["ag0", "rs0"])
        return medians

    outcomes = on_ranks(5, work, store)
    assert outcomes == [{"a": 2.0, "b": 0.2}] * 5
    assert store.num_keys() == before


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_medians_are_those_of_statistics(count: int) -> None:
    values = {rank: {"mm": 1.7**rank, "ag": 100.0 / (rank + 1)} for rank in range(count)}
    outcomes = on_ranks(count, lambda peers, rank: peers.agreement("f", 20).agree_on_medians(values[rank]))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0] == {name: median(values[rank][name] for rank in range(count)) for name in ("mm", "ag")}


def test_agreed_maxima_of_large_integers_are_exact() -> None:
    sizes = [{"a": 3, "b": 2**53 - 1}, {"a": 5, "b": 2**52 + 1}]
    outcomes = on_ranks(2, lambda peers, rank: peers.agreement("f", 20).agree_on_largest(sizes[rank]))
    assert outcomes == [{"a": 5, "b": 2**53 - 1}] * 2


def test_no_estimates_give_no_medians() -> None:
    assert on_ranks(2, lambda peers, rank: peers.agreement("f", 20).agree_on_medians({})) == [{}, {}]


def test_estimates_of_different_nodes_are_an_error_that_names_them() -> None:
    text = one_text(
        on_ranks(
            3,
            lambda peers, rank: peers.agreement("f", 20).agree_on_medians({"mm0": 1, "mm1" if rank else "mm2": 2}),
        )
    )
    assert "ranks have estimates of different nodes" in text
    assert re.search(r"ranks 1-2 \(2\): mm1\n   rank 0 \(1\): mm2", text)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_estimate_that_is_nan_or_infinite_is_an_error_on_all_ranks(value: float) -> None:
    def work(peers: Peers, rank: int) -> None:
        with peers.agreement("f", 20) as ranks:
            ranks.agree_on_medians({"mm": value if rank == 1 else 1.0})

    first, second = on_ranks(2, work)
    assert isinstance(second, ValueError)
    assert f"mm was estimated as {value}" in str(second)
    assert str(first).startswith("rank 1 failed in compilation 1 (f): ValueError: mm was estimated as")


def test_an_error_shows_the_first_differences_with_their_ranks() -> None:
    def work(peers: Peers, rank: int) -> None:
        lines = list(LINES)
        if rank == 3:
            lines[41] = "v42 = aten.add.Tensor(v41, v0) : bf16 2d"
        if rank == 5:
            del lines[90:]
        peers.agreement("forward", 20).agree_on_graph(GraphText(lines))

    text = one_text(on_ranks(8, work))
    assert text.startswith("compilation 1 (forward), graph: ranks compile different graphs\n")
    assert (
        "first difference at line 42:"
        "\n   ranks 0-2,4,6-7 (6): v42 = aten.mm.default(v41, v0) : bf16 2d"
        "\n   rank 3 (1): v42 = aten.add.Tensor(v41, v0) : bf16 2d" in text
    )
    assert f"first difference at line 91:\n   ranks 0-2,4,6-7 (6): {LINES[90]}" in text
    assert "rank 5 (1): (ends after 90 lines)" in text


def test_graphs_that_are_not_equal_may_have_the_same_collectives() -> None:
    def work(collectives: list[list[str]], operators: str = "mm mm", inputs: str = "ss") -> list:
        def agree(peers: Peers, rank: int) -> ComparedGraphs:
            text = GraphText(LINES[: 50 + rank], {}, [operators.split()[rank]], [inputs[rank]])
            return peers.agreement("forward", 20).agree_on_graph(text, "order", collectives[rank])

        return on_ranks(2, agree)

    ((cached, difference), other) = work([["all_reduce"], ["all_reduce"]])
    assert (cached, difference) == other
    assert not cached, "a hash of the order tells nothing about another graph"
    assert "rank 0 (1): (ends after 50 lines)" in difference
    for collectives in ([["all_reduce"], ["broadcast"]], [[], []], [["all_reduce"], []]):
        assert "(ends after 50 lines)" in one_text(work(collectives))
    same = [["all_reduce"], ["all_reduce"]]
    assert "(ends after 50 lines)" in one_text(work(same, "mm relu"))
    assert {result.cached for result in work(same, "mm relu", "s1")} == {False}, "torch traced it for another size"


def test_sizes_are_compared_within_each_group_only() -> None:
    groups = [(0, 1), (0, 1), (2, 3), (2, 3)]

    def work(rows: list[int]) -> list:
        def agree(peers: Peers, rank: int) -> bool:
            sizes = {groups[rank]: [f"v1 = all_reduce [{rows[rank]}]"]}
            return peers.agreement("forward", 20).agree_on_graph(GraphText(LINES, sizes), "order").cached

        return on_ranks(4, agree)

    assert work([4, 4, 2, 2]) == [True] * 4
    text = one_text(work([4, 4, 2, 3]))
    assert text.startswith("compilation 1 (forward), graph: ranks compile different graphs: other sizes in one group\n")
    assert "rank 2 (1): v1 = all_reduce [2]\n   rank 3 (1): v1 = all_reduce [3]" in text


def test_a_cached_step_is_reused_only_if_the_ranks_of_each_group_have_the_same_sizes() -> None:
    groups = [(0, 1), (0, 1), (2, 3), (2, 3)]

    def reused(sizes: str, cached: str = "aaaa") -> list[bool]:
        def have(peers: Peers, rank: int) -> bool:
            return peers.agreement("step", 20).compare_cached(cached[rank].strip(), {groups[rank]: sizes[rank]}, ())[0]

        return on_ranks(4, have)

    assert reused("4422") == [True] * 4
    assert reused("4423") == reused("4422", "aaab") == reused("4422", "    ") == [False] * 4


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        ([[[4, 8], [3]], [[4, 8], [3]]], ([], False)),
        ([[[4, 8], [3]], [[2, 8], [5]]], ([(0, 0, 4), (1, 0, 5)], True)),
        ([[[-4]], [[2]]], ([(0, 0, 4)], True)),
        ([[[-4]], [[-2]]], ([(0, 0, 4)], False)),
        ([[[-4, -8]], [[4, -8]]], ([(0, 0, 4)], True)),
        ([[[4, 8]], [[4, 1]]], ([], False)),  # torch always fixes 1
        ([[[4, 8]], [[32]]], ([], False)),  # the graphs differ, which ranks notice later
        ([[[4]], [[4], [2]]], ([], False)),
    ],
)
def test_ranks_find_the_sizes_in_which_their_inputs_differ(shapes: list, found: tuple[list, bool]) -> None:
    def differing(peers: Peers, rank: int) -> tuple[list[tuple[int, int, int]], bool]:
        return peers.agreement("step", 20).compare_cached("", {}, shapes[rank])[1:]

    assert on_ranks(2, differing) == [found] * 2


def test_many_different_graphs_make_a_short_error() -> None:
    text = one_text(
        on_ranks(12, lambda peers, rank: peers.agreement("f", 20).agree_on_graph(GraphText([f"x{rank}" * 500])))
    )
    assert "8 more variants on ranks 4-11" in text
    assert len(text) < 3000


def test_different_orders_of_collectives_are_an_error() -> None:
    orders = {0: ["ag0", "ag1", "rs0"], 1: ["ag0", "rs0", "ag1"]}
    text = one_text(on_ranks(2, lambda peers, rank: peers.agreement("f", 20).agree_on_order(orders[rank])))
    assert "ranks would issue collectives in different orders" in text
    assert "line 2:\n   rank 0 (1): ag1\n   rank 1 (1): rs0" in text


@pytest.mark.parametrize("absent", [0, 2])
def test_a_missing_rank_is_named_on_all_others_within_the_timeout(absent: int) -> None:
    def work(peers: Peers, rank: int) -> float:
        peers.agreement("forward", 20).agree_on_graph(TEXT)
        began = time.monotonic()
        if rank != absent:
            with pytest.raises(RanksDisagree) as caught:
                peers.agreement("forward", 0.3).agree_on_graph(TEXT)
            assert str(caught.value).startswith(
                f"rank {absent} did not reach compilation 2 (forward), graph within 0.3 s\n"
                f"   waiting there: ranks {format_ranks([rank for rank in range(4) if rank != absent])}\n"
                "   last agreement of all ranks: compilation 1 (forward), graph\n"
            )
        return time.monotonic() - began

    assert max(on_ranks(4, work)) < 2.5  # rank 0 keeps the store readable for a second


def test_a_late_rank_raises_the_error_that_the_other_ranks_raised() -> None:
    store = dist.HashStore()
    early = Peers(store, 0, (0, 1)).agreement("f", 0.1)
    with pytest.raises(RanksDisagree) as first:
        early.agree_on_graph(TEXT)
    with pytest.raises(RanksDisagree) as second:
        Peers(store, 1, (0, 1)).agreement("f", 20).agree_on_graph(TEXT)
    assert str(first.value) == str(second.value)
    assert "rank 1 did not reach" in str(first.value)


def test_ranks_that_continue_after_a_disagreement_can_agree_again() -> None:
    def work(peers: Peers, rank: int) -> str:
        with pytest.raises(RanksDisagree):
            peers.agreement("f", 20).agree_on_graph(GraphText([f"only on {rank}"]))
        peers.agreement("f", 20).agree_on_graph(TEXT)
        return "agreed"

    assert on_ranks(3, work) == ["agreed"] * 3


def test_ranks_at_different_points_raise_at_once() -> None:
    def work(peers: Peers, rank: int) -> None:
        if rank == 0:
            peers.agreement("forward", 20).agree_on_graph(TEXT)
        else:
            peers.agreement("forward", 20).agree_on_order(["ag0"])

    began = time.monotonic()
    text = one_text(on_ranks(3, work))
    assert "rank 0: compilation 1 (forward), graph\n   ranks 1-2: compilation 1 (forward), order of coll" in text
    assert time.monotonic() - began < 5


def test_a_failure_reaches_waiting_and_later_ranks() -> None:
    def work(peers: Peers, rank: int) -> None:
        with peers.agreement("forward", 20) as ranks:
            if rank == 1:
                time.sleep(0.1)  # until rank 0 waits
                raise ValueError("no such op\nwith more lines")
            time.sleep(0.3 if rank == 2 else 0)
            ranks.agree_on_graph(TEXT)

    began = time.monotonic()
    outcomes = on_ranks(3, work)
    assert isinstance(outcomes[1], ValueError)
    text = one_text([outcomes[0], outcomes[2]])
    assert text.startswith("rank 1 failed in compilation 1 (forward): ValueError: no such op\nhint: ")
    assert time.monotonic() - began < 5


def test_an_interrupted_rank_ends_the_wait_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C on one rank during an exchange, the other ranks learn of it in this exchange, not in the next."""
    store = dist.HashStore()
    peers = Peers(store, 0, (0, 1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peers.meetings, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt), peers.agreement("f", 20) as ranks:
        ranks.agree_on_graph(TEXT)
    with pytest.raises(RanksDisagree, match=r"rank 0 failed in compilation 1 \(f\): KeyboardInterrupt"):
        Peers(store, 1, (0, 1)).agreement("f", 20).agree_on_graph(TEXT)


def test_subgroups_agree_independently() -> None:
    store = dist.HashStore()

    def one(rank: int) -> dict[str, float]:
        pair = Peers(store, rank, (0, 2) if rank % 2 == 0 else (1, 3))
        for _ in range(1 + rank % 2):
            pair.agreement("stage", 20).agree_on_graph(GraphText([f"stage {rank % 2}"]))
        everyone = Peers(store, rank, range(4))
        return everyone.agreement("all", 20).agree_on_medians({"x": rank})

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [{"x": 1.5}] * 4


def test_a_restarted_job_does_not_read_keys_of_the_previous_run() -> None:
    store = dist.HashStore()
    with pytest.raises(RanksDisagree):
        Peers(store, 0, (0, 1), "job/0").agreement("f", 0.05).agree_on_graph(TEXT)
    outcomes = on_ranks(2, lambda peers, rank: peers.agreement("f", 20).agree_on_graph(TEXT), store, "job/1")
    assert outcomes == [EQUAL, EQUAL]


def test_a_verdict_of_another_job_in_the_same_store_is_an_error() -> None:
    """As in a FileStore whose file was not deleted: the verdict is there before any rank has posted."""
    store = dist.HashStore()
    for rank in (0, 1):
        peers = Peers(store, rank, (0, 1))
        keys = peers.meetings._next()
        peers.meetings._held -= 1
        if rank == 0:
            store.set(keys.verdict, '+{"digest": "' + "0" * 64 + '"}\n')
        with pytest.raises(RanksDisagree, match="the answer of another job"):
            peers.agreement("f", 20).agree_on_graph(TEXT)


def test_a_single_rank_does_not_use_the_store() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    with Peers(store, 7, (7,)).agreement("f", 0.01) as ranks:
        ranks.agree_on_graph(TEXT)
        assert ranks.agree_on_medians({"mm": 3.25}) == {"mm": 3.25}
        ranks.agree_on_order([])
    assert store.num_keys() == before


def test_without_a_process_group_the_process_is_alone() -> None:
    assert not dist.is_initialized()
    assert rank_agreement.peers_of().meetings.ranks == (0,)


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 3 is not one of the ranks of this meeting: 0-1"):
        Peers(dist.HashStore(), 3, (0, 1))


def test_ranks_agree_over_a_file_store(tmp_path) -> None:
    """FileStore lacks the extended store API, and raises another class of error on timeouts."""

    def work(peers: Peers, rank: int) -> dict[str, float]:
        return peers.agreement("f", 20).agree_on_medians({"mm": rank})

    assert on_ranks(2, work, dist.FileStore(str(tmp_path / "store"), 2)) == [{"mm": 0.5}] * 2
    with pytest.raises(RanksDisagree, match="rank 1 did not reach"):
        Peers(dist.FileStore(str(tmp_path / "other"), 2), 0, (0, 1)).agreement("f", 0.1).agree_on_graph(GraphText([]))


def test_a_lost_store_is_an_error_that_names_the_store() -> None:
    host = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, 1, False, timedelta(seconds=5))
    peers = Peers(client, 1, (0, 1))
    del host
    with pytest.raises(RanksDisagree, match=r"lost the rendezvous store \(127.0.0.1:\d+\) at compilation 1"):
        peers.agreement("f", 3).agree_on_graph(TEXT)


@pytest.mark.parametrize(("kind", "count"), [("hash", 1000), ("tcp", 8)])
def test_the_work_of_a_rank_is_small_with_many_ranks(kind: str, count: int) -> None:
    """CPU time is measured per rank. Over TCP every rank has its own connection, as in a real job."""
    lines = LINES * 20
    values = {f"n{i}": float(i) for i in range(200)}
    wait = timedelta(seconds=60)
    host = dist.TCPStore("127.0.0.1", 0, 1, True, wait, wait_for_workers=False) if kind == "tcp" else None
    shared = dist.HashStore()

    def one(rank: int) -> tuple[float, dict[str, float]]:
        store = dist.TCPStore("127.0.0.1", host.port, 1, False, wait, wait_for_workers=False) if host else shared
        began = time.thread_time()
        with Peers(store, rank, range(count)).agreement("forward", 60) as ranks:
            ranks.agree_on_graph(GraphText(lines))
            medians = ranks.agree_on_medians({name: value + rank for name, value in values.items()})
            ranks.agree_on_order(LINES)
        return time.thread_time() - began, medians

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(one, range(count)))
    assert all(medians == outcomes[0][1] for _, medians in outcomes)
    assert outcomes[0][1]["n7"] == 7 + (count - 1) / 2
    assert max(seconds for seconds, _ in outcomes) < 5


def test_agreeing_on_a_large_graph_is_quick() -> None:
    lines = [f"v{i} = aten.mm.default(v{i - 1}, v0) : bf16 2d" for i in range(20_000)]
    began = time.monotonic()
    assert on_ranks(8, lambda peers, rank: peers.agreement("f", 20).agree_on_graph(GraphText(lines))) == [EQUAL] * 8
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "3"), ([0, 1, 2, 5], "0-2,5"), (range(0, 40, 2), "0,2,4,6,8,10,12,14 and 12 more")],
)
def test_ranks_are_printed_as_ranges(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_a_cached_step_is_used_only_if_all_ranks_have_the_same():
    def agree(kept: list[str]) -> list[Any]:
        return on_ranks(
            len(kept),
            lambda peers, rank: (
                peers.agreement("f", 20).agree_on_graph(GraphText(["v0 = placeholder"]), kept[rank]).cached
            ),
        )

    assert agree(["order", "order", "order"]) == [True] * 3
    assert agree(["order", "", "order"]) == [False] * 3
    assert agree(["order", "order", "another"]) == [False] * 3


def test_tables_of_all_ranks_are_merged_with_the_largest_value() -> None:
    known = [{"a": {"x": 1.0}, "b": {"x": 10.0}}, {"a": {"x": 3.0, "y": 4.0}}, {}, {"b": {"x": 2.0}, "c": {"z": 0.1}}]

    def work(peers: Peers, rank: int) -> tuple[tuple[int, int], dict[str, dict[str, float]]]:
        with peers.agreement("f", 20) as ranks:
            return ranks.index_and_count, ranks.agree_on_tables(known[rank])

    told = {"a": {"x": 3.0, "y": 4.0}, "b": {"x": 10.0}, "c": {"z": 0.1}}
    assert on_ranks(4, work) == [((rank, 4), told) for rank in range(4)]
    assert Peers(dist.HashStore(), 5, (5,)).agreement("f", 20).agree_on_tables(known[3]) == known[3]
