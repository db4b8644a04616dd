"""Queues of copies between ranks, without other ranks."""

from __future__ import annotations

from typing import Any

import pytest

from overlapc.runtime.copies.command_queues import ThreadQueue
from overlapc.runtime.copies.commands import Run


def test_after_any_error_every_wait_raises_it_and_none_hangs():
    queue = ThreadQueue("dp", str, timeout_s=5.0)
    no_command: Any = object()
    failed, later = queue.run((no_command,), Run(0, 0)), queue.run((), Run(0, 0))
    for wait in (lambda: queue.wait(failed), lambda: queue.wait(later), queue.drain):
        with pytest.raises(AttributeError):
            wait()
    queue.close()
