"""When parts of a graph are recorded, replayed and recorded again, and where their arguments and results are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import destroy_process_group  # by name, as many scripts import it

from overlapc.runtime.counters import counted
from overlapc.runtime.cuda_graphs import CaptureError, Parts
from tests.runtime.repeated import Repeated


def scaled(args: list[Any]) -> tuple[Tensor, ...]:
    x, w = args
    args.clear()
    return (x * w,)


def one_part(function: Callable[..., Any] = scaled, **how: Any) -> tuple[Repeated, Callable[..., Any]]:
    recorder = Repeated()
    return recorder, Parts("test", recorder).part(**how)(function)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values)


def test_the_first_call_runs_the_second_records_later_ones_replay():
    recorder, part = one_part()
    x, w = numbers(1.0, 2.0), numbers(3.0, 4.0)
    for call, (recorded, replays) in enumerate([(0, 0), (1, 1), (1, 2), (1, 3)]):
        x.fill_(call)
        (result,) = part([x, w])
        assert torch.equal(result, call * w)
        assert (recorder.recorded, recorder.replays) == (recorded, replays)


def test_recordings_are_freed_before_process_groups_are_destroyed():
    """Otherwise NCCL would wait forever for CUDA graphs that contain its launches."""
    recorder, part = one_part()
    x, w = numbers(1.0, 2.0), numbers(3.0, 4.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(3):
        part([x, w])
    assert part.recording is not None
    destroy_process_group()
    assert not dist.is_initialized()
    assert part.recording is None
    assert torch.equal(part([x, w])[0], x * w)
    assert recorder.recorded == 2


def test_an_argument_that_stays_is_read_in_place_and_one_that_moves_is_copied():
    recorder, part = one_part()
    w, kept = numbers(3.0, 4.0), []
    for call in range(4):
        kept.append(torch.full((2,), float(call)))  # all stay alive, so each has another address
        assert torch.equal(part([kept[-1], w])[0], call * w)
    assert recorder.recorded == 1
    assert list(part.recording.buffers) == [0]
    assert list(part.recording.placed) == [1]
    assert all(torch.equal(each, torch.full((2,), float(call))) for call, each in enumerate(kept))


def test_a_moved_parameter_costs_one_recapture():
    recorder, part = one_part()
    x, w = numbers(1.0, 2.0), numbers(3.0, 4.0)
    before = counted("cuda_graph_recaptures")
    moved = [w, w, w, w.clone(), w.clone(), w.clone()]
    for each in moved:
        each.add_(1)
        assert torch.equal(part([x, each])[0], x * each)
    assert counted("cuda_graph_recaptures") == before + 1
    assert recorder.recorded == 2
    assert recorder.restarts == 1, "the memory of the only recording must be freed"


def test_a_copied_argument_of_another_layout_is_recorded_anew():
    recorder, part = one_part()
    w = numbers(2.0)
    views = [torch.arange(12.0).view(3, 4) + at for at in range(3)] + [torch.arange(12.0).view(4, 3).t()]
    for x in views:
        assert torch.equal(part([x, w])[0], x * 2)
    assert recorder.recorded == 2


def test_arguments_that_a_part_changes_are_changed_in_the_callers_memory():
    def grow(args: list[Any]) -> tuple[Tensor, ...]:
        (x,) = args
        args.clear()
        x.add_(1)
        return (x * 2,)

    _, part = one_part(grow, written=[0])
    kept = [torch.zeros(6)[::2] for _ in range(4)]
    for x in kept:
        assert torch.equal(part([x])[0], torch.full((3,), 2.0))
        assert torch.equal(x, torch.ones(3))


def test_arguments_in_the_gaps_of_each_other_are_both_changed():
    def count_up(args: list[Any]) -> tuple[Tensor, ...]:
        left, right = args
        args.clear()
        left.add_(1)
        right.add_(10)
        return ()

    _, part = one_part(count_up, written=[0, 1])
    kept = [torch.zeros(3, 2) for _ in range(4)]
    for rows in kept:
        part([rows[:, 0], rows[:, 1]])
        assert torch.equal(rows, numbers(1.0, 10.0).expand(3, 2))


def test_parts_after_a_new_recording_are_recorded_again():
    recorder = Repeated()
    parts = Parts("test", recorder)
    first, second = parts.part()(scaled), parts.part(inner=[0])(scaled)
    w = numbers(3.0, 4.0)

    def call(x: Tensor) -> Tensor:
        (y,) = first([x, w])
        return second([y, w])[0].clone()

    x = numbers(1.0, 2.0)
    for _ in range(3):
        assert torch.equal(call(x), x * w * w)
    assert recorder.recorded == 2
    for moved in (x + 1, x + 2):
        assert torch.equal(call(moved), moved * w * w)
    assert recorder.recorded == 4
    assert list(second.recording.placed) == [0, 1], "the first part's result must be read in place"


def test_parts_run_without_recording_inside_another_recording():
    recorder, part = one_part()
    x, w = numbers(1.0, 2.0), numbers(3.0, 4.0)
    part([x, w])
    recorder.others = True
    assert torch.equal(part([x, w])[0], x * w)
    assert recorder.recorded == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(24.0)[1::2],
        torch.ones(1).expand(5),
        torch.empty(0, 3),
        torch.tensor(7, dtype=torch.int64),
    ],
    ids=["transposed", "strided", "expanded", "empty", "scalar"],
)
def test_copies_have_the_same_layout_and_their_own_memory(tensor: Tensor):
    (copy,) = Parts("test", Repeated()).copied(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


def test_a_capture_error_names_the_part():
    def refuses(args: list[Any]) -> tuple[Tensor, ...]:
        if calls:
            raise RuntimeError("operation not permitted when stream is capturing")
        calls.append(1)
        return (args[0],)

    calls: list[int] = []
    _, part = one_part(refuses)
    part([numbers(1.0)])
    with pytest.raises(CaptureError, match=r"part 0 of test .*not permitted"):
        part([numbers(1.0)])
