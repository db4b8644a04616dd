"""Subjects of a benchmark run in turns, and a subject that fails or hangs does not affect the others."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.turns import Turns, answer, store_at


def serve(subject: str, rank: int, ranks: int, port: int) -> None:
    """Answer every turn with the turns so far and all ranks; `dies` and `hangs` fail on the last rank's second turn."""
    store = store_at(port)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{subject}/group", store), rank=rank, world_size=ranks)
    done: list[str] = []

    def do(turn: str) -> dict[str, Any]:
        done.append(turn)
        if rank == ranks - 1 and len(done) == 2:
            if subject == "dies":
                raise ValueError("something went wrong")
            if subject == "hangs":
                time.sleep(600)
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, rank)
        return {"turns": done, "ranks": gathered, "told": os.environ.get("TOLD", "")}

    answer(store, subject, rank, do)
    dist.destroy_process_group()


def test_a_subject_that_fails_or_hangs_does_not_affect_the_others(tmp_path: Path):
    turns = Turns(2, tmp_path, serve)
    subjects = ["fine", "dies", "hangs"]
    try:
        for subject in subjects:
            turns.begin(subject, {"TOLD": subject})
        first = turns.take("first", subjects, seconds=120)
        assert first == {each: {"turns": ["first"], "ranks": [0, 1], "told": each} for each in subjects}
        assert set(turns.take("second", subjects[:2], seconds=120)) == {"fine"}
        assert turns.take("second", ["hangs"], seconds=1) == {}
        assert turns.alive(subjects) == ["fine"]
        assert turns.take("third", subjects, seconds=120)["fine"]["turns"] == ["first", "second", "third"]
    finally:
        turns.end()
    assert turns.failed["dies"] == "second: rank 1 raised ValueError: something went wrong"
    assert turns.failed["hangs"] == "second: no answer in 1 s"
    assert turns.alive(subjects) == []


def test_of_ranks_that_raised_nothing_the_first_ones_log_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    turns = Turns(2, tmp_path, serve)
    monkeypatch.setitem(turns._processes, "dies", [SimpleNamespace(exitcode=1)] * 2)
    for rank, (error, seconds) in enumerate((("RuntimeError: connection closed", 20), ("ValueError: wrong", 10))):
        log = tmp_path / f"dies_{rank}.log"
        log.write_text(f"Traceback\n{error}\n")
        os.utime(log, (seconds, seconds))
    assert turns._last_words("dies") == "rank 1 ended with 1: ValueError: wrong"
