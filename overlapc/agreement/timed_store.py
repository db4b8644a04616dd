"""A rendezvous store in which every request has a timeout.

A torch store obeys its timeout in `wait` and `get` only: if the process that hosts the store is stopped, or the
network is down, `set`, `add`, `check`, `compare_set` and `clone` wait for an answer forever. So each request runs in
its own thread, and the caller waits for that thread for a limited time; Ctrl-C also ends that wait.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

_GRACE_S = 5.0  # time that a request may take beyond its deadline
_LOOK_S = 0.1  # period at which a waiting caller evaluates `stop`
_CONNECT_S = 1.0  # timeout for a host that neither accepts nor refuses a connection


def connected(store: dist.Store) -> dist.Store:
    """Return a new connection to the server of `store`.

    Raise DistNetworkError at once if the process that hosts it has ended; torch's client would retry until its timeout.
    """
    host = _over_tcp(store)
    if host is not None:
        try:
            socket.create_connection((host.host, host.port), _CONNECT_S).close()
        except ConnectionRefusedError as error:
            raise dist.DistNetworkError(str(error)) from None
        except OSError:  # unreachable, perhaps only for a while
            pass
    made: dist.Store = store.clone()  # type: ignore[attr-defined]
    return made


def _over_tcp(store: dist.Store | None) -> dist.TCPStore | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


class NoAnswer(Exception):
    """The store did not answer in time; the message names the request."""


class TimedStore:
    """A store whose requests always end, with the answer, an error of the store, or NoAnswer."""

    def __init__(self, store: dist.Store | Callable[[], dist.Store]) -> None:
        """store: a store, or a function that connects to it, called at the first request."""
        self._connect = store if not isinstance(store, dist.Store) else lambda: store
        self._store = store if isinstance(store, dist.Store) else None
        self._pending: threading.Thread | None = None
        self.deadline_s = 0.0  # on the clock of time.monotonic

    def __str__(self) -> str:
        """Return ` (host:port)` for a store over TCP, else ""."""
        store = _over_tcp(self._store)
        return f" ({store.host}:{store.port})" if store is not None else ""

    def set(self, key: str, value: bytes) -> None:
        """Store this rank's value."""
        self._ask("to store this rank's value", lambda store: store.set(key, value))  # type: ignore[arg-type]

    def add(self, key: str, count: int) -> int:
        """Add `count` to the counter and return the sum."""
        return self._ask("to count this rank", lambda store: store.add(key, count))

    def check(self, key: str) -> bool:
        """Whether the key exists."""
        return self._ask("to check whether a rank has arrived", lambda store: store.check([key]))

    def wait(self, key: str, seconds: float, stop: Callable[[], bool] | None = None) -> bool:
        """Wait until the key exists. Return False if it does not within `seconds`, or once `stop` returns True."""
        try:
            waits = timedelta(seconds=max(seconds, 0.001))
            self._ask("for the verdict", lambda store: store.wait([key], waits), stop)
        except _Stopped:
            return False
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a timeout: DistStoreError, but FileStore raises its base class
            return False
        return True

    def get(self, key: str) -> bytes:
        """Return the value of the key."""
        return self._ask("for the verdict", lambda store: store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the value of each key."""
        return self._ask("for the values of the ranks", lambda store: store.multi_get(list(keys)))

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Set `value` unless the key has a value; return the key's value."""
        purpose = "to store the verdict"
        return self._ask(purpose, lambda store: store.compare_set(key, "", value))  # type: ignore[arg-type]

    def delete_key(self, key: str) -> None:
        """Delete the key."""
        self._ask("to delete a key", lambda store: store.delete_key(key))

    def _ask(
        self, purpose: str, request: Callable[[dist.Store], Result], stop: Callable[[], bool] | None = None
    ) -> Result:
        if self._pending is not None and self._pending.is_alive():
            # A caller stopped waiting for that request, which still occupies the connection.
            assert self._store is not None
            self._store = self._in_thread("to open another connection", partial(connected, self._store), None)
        if self._store is None:
            self._store = self._in_thread("to open a connection", self._connect, None)
        store = self._store
        if isinstance(store, dist.HashStore):  # in this process: it answers
            return request(store)
        return self._in_thread(purpose, lambda: request(store), stop)

    def _in_thread(self, purpose: str, request: Callable[[], Result], stop: Callable[[], bool] | None) -> Result:
        """Run `request()` in another thread, which ends with the request or with the process; return its result."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def make() -> None:
            try:
                results.append(request())
            except BaseException as error:  # noqa: BLE001  # raised again below
                errors.append(error)

        until_s = max(self.deadline_s, time.monotonic()) + _GRACE_S
        thread = self._pending = threading.Thread(target=make, name="overlapc store request", daemon=True)
        thread.start()
        while thread.is_alive():
            left_s = until_s - time.monotonic()
            thread.join(max(0.0, left_s if stop is None else min(left_s, _LOOK_S)))
            if not thread.is_alive():
                break
            if stop is not None and stop():
                raise _Stopped
            if left_s <= 0:
                raise NoAnswer(purpose)
        self._pending = None
        if errors:
            raise errors[0]
        return results[0]


class _Stopped(Exception):
    """`stop` returned True while a request was waiting."""
