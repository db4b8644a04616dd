"""A random selection of torch's operators, a different one each day, and every case that was once wrong.

When a case fails, its seed is printed; `OVERLAPC_TEST_SEED=7 pytest tests/ops` sets the seed.
`python -m tests.ops.sweep` runs all operators.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from tests.ops.harness import classify, full_name, in_form, operators, samples

# Workers of pytest-xdist must use the same seed, so the default is the day.
SEED = int(os.environ.get("OVERLAPC_TEST_SEED", time.strftime("%Y%j")))
COUNT = 36
SLOW = frozenset("cumprod linalg.householder_product masked.cumprod masked.var ormqr".split())  # more than 5 s

BY_NAME = {full_name(op): op for op in operators()}


def drawn() -> list[tuple[str, str, bool]]:
    """Draw operators; return (operator, dtype, whether shapes are symbolic) for each."""
    chance = random.Random(SEED)
    names = chance.sample(sorted(BY_NAME.keys() - SLOW), COUNT)
    found = []
    for at, name in enumerate(names):
        dtypes = [torch.float32, torch.bfloat16, torch.int64] if at % 3 == 0 else [torch.float32]
        known = [dtype for dtype in dtypes if dtype in BY_NAME[name].supported_dtypes("cpu")]
        if known:
            found.append((name, str(chance.choice(known)).removeprefix("torch."), at % 2 == 0))
    return found


def same(name: str, dtype: str, dynamic: bool, count: int | None, seed: int) -> None:
    op = BY_NAME[name]
    for number, sample in enumerate(samples(op, getattr(torch, dtype), count, seed)):
        outcome = classify(op, sample, dynamic)
        assert outcome.kind in ("pass", "skip", "eager"), f"sample {number}: {outcome.kind}: {outcome.reason}\n{sample}"


@pytest.mark.parametrize(("name", "dtype", "dynamic"), drawn(), ids=lambda value: f"{value}")
def test_an_operator_drawn_by_todays_seed_equals_eager(name, dtype, dynamic):
    try:
        same(name, dtype, dynamic, 1, SEED)
    except AssertionError:
        print(f"again: OVERLAPC_TEST_SEED={SEED} pytest tests/ops -k '{name}'")
        raise


def test_samples_with_holes_leave_sparse_tensors_as_they_are():
    dense = torch.randn(3, 4)
    changed = in_form(SampleInput(dense, args=(dense.to_sparse_csr(),)), "holes")
    assert not changed.input.is_contiguous()
    assert changed.args[0].layout == torch.sparse_csr


# Bugs that the sweep found: operator, dtype, dynamic, samples, seed, and what was wrong.
FOUND = [
    ("block_diag", "float32", False, 3, 0, "a tensor that stood in a cat twice hid its neighbours"),
    ("nn.functional.layer_norm", "float32", False, 3, 0, "a producer without elements was inlined: modulo by zero"),
    ("nanmedian", "float32", False, 1, 0, "a reduction over one element lost its loop in a merge"),
    ("masked.mean", "float32", False, 2, 0, "the same, with a mask"),
    ("native_batch_norm", "float32", False, 2, 0, "a buffer mutated twice in one graph was called by a wrong name"),
    ("linalg.eigvals", "float32", False, 1, 0, "effect tokens are None at run time"),
    ("fft.ifft2", "float32", False, 1, 0, "views as complex numbers shared memory that was reused"),
    ("complex", "float32", False, 1, 0, "the same, of no dims"),
    ("var_mean", "float32", True, 2, 0, "float arithmetic on sizes was no number"),
    ("nn.functional.interpolate.bilinear", "float32", True, 2, 0, "sizes computed through floats have no C++"),
    ("nn.functional.upsample_nearest", "float32", True, 2, 0, "the same; and the wrapper lacked math"),
    ("nn.functional.pad.circular", "float32", False, 2, 0, "a cat of parts without elements"),
    ("linspace.tensor_overload", "bfloat16", False, 3, 1, "the decomposition rounds elsewhere"),
    ("nn.functional.embedding_bag", "bfloat16", False, 3, 1, "a saved result of another size than its fake one"),
    ("native_group_norm", "bfloat16", False, 1, 1, "backward rounded between its steps"),
]


@pytest.mark.parametrize(
    ("name", "dtype", "dynamic", "count", "seed", "wrong"), FOUND, ids=lambda value: f"{value}"[:40]
)
def test_bugs_that_the_sweep_found_stay_fixed(name, dtype, dynamic, count, seed, wrong):
    if name not in BY_NAME:
        pytest.skip(f"no {name} in the operators of torch {torch.__version__}")
    same(name, dtype, dynamic, count, seed)


def test_the_harness_notices_wrong_results_gradients_and_arguments():
    from tests.ops.harness import Differs, check

    sample = next(iter(BY_NAME["sin"].sample_inputs("cpu", torch.float32, requires_grad=True)))

    def wrongly(change):
        return lambda function: lambda x: change(x, function(x))

    assert check(torch.sin, sample, lambda function: function) == ""
    with pytest.raises(Differs):
        check(torch.sin, sample, wrongly(lambda x, y: y + 1e-3))
    with pytest.raises(Differs):
        check(torch.sin, sample, wrongly(lambda x, y: y.detach() + (x - x.detach()) * 2))
    with pytest.raises(Differs):
        check(torch.sin, sample, wrongly(lambda x, y: (y, x.data.add_(1))[0]))
    with pytest.raises(Differs):
        check(torch.sin, sample, wrongly(lambda x, y: y.double()))


@pytest.mark.parametrize("error", [0.05, -0.02])
def test_the_harness_notices_errors_in_low_precision(error):
    """Single roundings may differ, but an error of several roundings in every element must be noticed."""
    from tests.ops.harness import Differs, check

    for sample in BY_NAME["mul"].sample_inputs("cpu", torch.bfloat16, requires_grad=True):
        if sample.input.numel() > 20:
            check(torch.mul, sample, lambda function: function)
            with pytest.raises(Differs):
                check(torch.mul, sample, lambda function: lambda *args: function(*args) * (1 + error))
