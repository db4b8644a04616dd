"""The list of benchmark kernels: every problem runs, and the bytes that it must move are known."""

from dataclasses import replace

import pytest
import torch

from benchmarks.held_out_kernels import HELD_OUT
from benchmarks.kernel_cases import BOTH, PROBLEMS, RARE, SCALES, Inputs
from benchmarks.kernel_subject import Subject, checked
from benchmarks.kernels import least_bytes


@pytest.mark.parametrize("name", [*PROBLEMS, *RARE, *HELD_OUT])
def test_every_problem_runs_and_must_move_some_bytes(name):
    torch.manual_seed(0)
    problem = (PROBLEMS | RARE | HELD_OUT)[name](Inputs(SCALES["tiny"], "cpu"))
    subject = Subject(problem, "eager", name)
    outputs = [result for result in subject.results() if result is not None]
    assert outputs
    assert not problem.gradients or len(subject.both()) == len(problem.gradients)
    bytes_of = {kind: least_bytes(problem, kind, outputs, ()) for kind in problem.kinds}
    assert min(bytes_of.values()) > 0
    assert BOTH not in bytes_of or bytes_of[BOTH] == max(bytes_of.values())


def test_a_wrong_result_is_reported():
    problem = PROBLEMS["SwiGLU"](Inputs(SCALES["tiny"], "cpu"))
    eager = Subject(problem, "eager", "SwiGLU")
    reference = [result.double() for result in eager.results()]
    assert checked(problem, eager, eager, reference) == "ok"
    off = replace(problem, function=lambda gate, up: problem.function(gate, up) * 1.01)
    assert "result 0: error" in checked(problem, Subject(off, "eager", "off"), eager, reference)
