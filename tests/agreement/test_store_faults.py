"""If the rendezvous store is unreachable or its host stops, every request ends in time with an error that says so."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from overlapc.agreement import timed_store
from overlapc.agreement.graph_text import GraphText
from overlapc.agreement.rank_agreement import Peers, peers_of
from overlapc.agreement.timed_store import TimedStore, connected
from overlapc.errors import RanksDisagree
from tests.ranks import run_on_ranks

TIMEOUT_S = 0.2
GRACE_S = 0.3
MARGIN_S = 30.0  # for a busy machine; a request without a time limit would never end


class Network:
    """A proxy between a store and its clients that can be stopped, so that no data passes, or cut."""

    def __init__(self, port: int) -> None:
        self._store_port = port
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.port, 1, False, timedelta(seconds=60), wait_for_workers=False)

    def stop(self) -> None:
        self._flows.clear()

    def cut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                store = socket.create_connection(("127.0.0.1", self._store_port))
                self._sockets += client, store
                for ends in ((client, store), (store, client)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                target.sendall(data)


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)


def meet(peers: Peers) -> None:
    """Run all exchanges of one compilation, and fail after them."""
    with peers.agreement("forward", TIMEOUT_S) as ranks:
        ranks.agree_on_graph(GraphText(["v0 = placeholder"]))
        ranks.agree_on_medians({"mm": 1.0})
        raise ValueError("told to the others")


def met(network: Network, monkeypatch: pytest.MonkeyPatch, run: str, at: int, fault: str) -> tuple[int, str, float]:
    """Run `meet` on two ranks; before request number `at` of rank 1, stop or cut its network, as `fault` says.

    Returns the number of requests that rank 1 made, the error that it raised, and the seconds from fault to error.
    """
    requests, began = 0, 0.0
    rank1 = threading.get_ident()
    inner = TimedStore._in_thread

    def counted(store: TimedStore, *what: Any) -> object:
        nonlocal requests, began
        if threading.get_ident() == rank1:
            requests += 1
            if requests == at:
                getattr(network, fault)()
                began = time.monotonic()
        return inner(store, *what)

    own, theirs = network.connect(), network.connect()

    def other() -> None:
        with pytest.raises((RanksDisagree, ValueError)):
            meet(Peers(theirs, 0, (0, 1), run))

    monkeypatch.setattr(TimedStore, "_in_thread", counted)
    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises((RanksDisagree, ValueError)) as caught:
        meet(Peers(own, 1, (0, 1), run))
    seconds = time.monotonic() - began
    thread.join()
    monkeypatch.undo()
    return requests, str(caught.value), seconds


@pytest.mark.parametrize("fault", ["stop", "cut"])
def test_every_request_ends_in_time_if_the_store_cannot_be_reached(store, monkeypatch, fault) -> None:
    for at in itertools.count(1):
        network = Network(store.port)
        monkeypatch.setattr(timed_store, "_GRACE_S", GRACE_S)
        requests, error, seconds = met(network, monkeypatch, f"{fault} {at}", at, fault)
        network.cut()
        if requests < at:
            break
        assert seconds < TIMEOUT_S + 2 * GRACE_S + MARGIN_S, f"request {at}"
        if error == "told to the others":  # the fault came after both exchanges, when no rank waits any more
            continue
        assert "rank 1" in error, error
        assert f"(127.0.0.1:{network.port}) " in error, error
        assert " compilation 1 (forward), " in error, error
        assert "hint: " in error
    assert error == "told to the others"
    assert at > 10


def test_a_rank_that_connects_after_the_store_has_ended_raises_at_once(store) -> None:
    network = Network(store.port)
    own = network.connect()
    network.cut()
    with pytest.raises(RanksDisagree, match=r"rank 1 lost the rendezvous store at compilation 1 \(forward\), graph"):
        meet(Peers(lambda: connected(own), 1, (0, 1), "ended before"))


def one_stops(folder: str) -> float:
    """Stop rank 0, which hosts the store, before rank 1 has connected; return the seconds until rank 1's error."""
    mine, other = Path(folder) / str(dist.get_rank()), Path(folder) / str(1 - dist.get_rank())
    mine.with_suffix(".new").write_text(str(os.getpid()))
    mine.with_suffix(".new").rename(mine)
    while not other.exists():
        time.sleep(0.01)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0
    host = int(other.read_text())
    while " T " not in Path(f"/proc/{host}/stat").read_text():
        time.sleep(0.01)
    timed_store._GRACE_S = GRACE_S
    began = time.monotonic()
    try:
        with pytest.raises(RanksDisagree, match=r"does not answer rank 1 at compilation 1 \(forward\), graph"):
            peers_of().agreement("forward", TIMEOUT_S).agree_on_graph(GraphText(["v0 = placeholder"]))
    finally:
        os.kill(host, signal.SIGCONT)
    return time.monotonic() - began


def test_a_rank_raises_in_time_if_the_host_of_the_store_is_stopped(tmp_path: Path) -> None:
    outcomes = run_on_ranks(one_stops, 2, str(tmp_path))
    assert [outcome.traceback for outcome in outcomes] == ["", ""]
    assert outcomes[1].value < TIMEOUT_S + 2 * GRACE_S + MARGIN_S
