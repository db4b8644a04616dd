"""A thread that looks after the ranks of a run while the launcher waits for them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType


class WatchThread(ABC):
    """Runs `watch` beside a `with` block, once a subclass has started `thread`; the end of the block ends it."""

    def __init__(self, name: str) -> None:
        self.over = threading.Event()  # set when the block ends: `watch` returns soon
        self.thread = threading.Thread(target=self.watch, name=name, daemon=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()

    @abstractmethod
    def watch(self) -> None:
        """What the thread does."""
