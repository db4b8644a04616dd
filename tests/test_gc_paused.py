"""Garbage collection is paused while Dynamo compiles, and only then."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler


@pytest.fixture
def compiling(monkeypatch):
    """Return a function that returns the context in which Dynamo compiles a frame.

    Removes callbacks of other tests. A test may freeze objects.
    """
    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    for _ in range(2):
        torch.compile(lambda x: x, backend="overlapc")
    yield lambda: callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0")
    gc.unfreeze()


def test_a_compile_collects_no_garbage(compiling):
    gc.collect()  # so that no collection is due
    collections = sum(each["collections"] for each in gc.get_stats())
    with compiling():
        with compiling():
            assert not gc.isenabled()
        assert not gc.isenabled()
        kept = [[] for _ in range(100_000)]
    assert gc.isenabled()
    assert sum(each["collections"] for each in gc.get_stats()) == collections
    assert len(kept) == 100_000
    assert gc.get_freeze_count() == 0


def test_a_collector_that_the_user_disabled_stays_disabled(compiling):
    gc.disable()
    try:
        with compiling():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_that_the_user_froze_stay_frozen(compiling):
    frozen = [[] for _ in range(100)]
    gc.freeze()
    with compiling():
        made = [[] for _ in range(100)]
    collected = {id(each) for each in gc.get_objects()}  # all that collections look at: no frozen objects
    assert gc.isenabled()
    assert not collected & {id(each) for each in frozen}
    assert collected >= {id(each) for each in made}


def test_a_few_objects_that_python_froze_when_it_started_make_no_difference():
    code = """
import gc
gc.freeze()  # Python 3.12 starts like this, with some hundred objects
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler
import overlapc

torch.compile(lambda x: x, backend="overlapc")
gc.collect()
collections = sum(each["collections"] for each in gc.get_stats())
with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
    kept = [[] for _ in range(100_000)]
assert gc.isenabled()
assert sum(each["collections"] for each in gc.get_stats()) == collections
"""
    subprocess.run([sys.executable, "-c", code], check=True)
