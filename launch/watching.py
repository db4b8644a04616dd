"""A thread that watches the ranks of a run while the launcher waits for them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType


class WatchThread(ABC):
    """Runs `watch` in a thread until the end of a `with` block. Subclasses start `thread`."""

    def __init__(self, name: str) -> None:
        self.over = threading.Event()  # set when the block ends: `watch` must return soon
        self.thread = threading.Thread(target=self.watch, name=name, daemon=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()

    @abstractmethod
    def watch(self) -> None:
        """Run in the thread, until `over` is set."""
