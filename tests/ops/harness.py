"""Run one sample of one torch operator in eager and compiled, forward and backward, and compare the results.

The operators and their samples are those of torch's own tests (`op_db`). Random operators get the same seed in both
runs and must draw the same numbers. A compiled result is right if it is close to eager's (`torch.testing.assert_close`)
or if its error against a float64 run is at most twice eager's. In low precision, eager's roundings may cancel by chance
in a sample of few elements; then the largest errors over `NEIGHBOURS` calls are compared instead, each with every input
changed by one or two roundings.
"""

from __future__ import annotations

import copy
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from overlapc.backend import overlapc as backend

SECONDS_PER_SAMPLE = 120
NEIGHBOURS = 12  # calls: enough that the largest error of all roundings does not depend on chance

# Operators whose results are uninitialized memory: everything but the numbers is compared.
UNINITIALIZED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split()
)
# What an operator may raise for a sample, in eager or while it is compiled.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one sample; `kind` is pass, skip (eager refuses the sample), eager (aot_eager fails, too), raises or
    differs."""

    kind: str
    reason: str = ""


class Differs(AssertionError):
    """The compiled results differ from eager's."""


def operators() -> list[OpInfo]:
    """Return all operators of torch's `op_db`, in its order."""
    return list(op_db)


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def samples(op: OpInfo, dtype: torch.dtype, count: int | None, seed: int, device: str = "cpu") -> list[SampleInput]:
    """Return `count` samples: the first one, and others drawn with `seed`. Returns all samples if `count` is None."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
    torch.manual_seed(seed)
    made = list(op.sample_inputs(device, dtype, requires_grad=grad))
    if count is None or len(made) <= count:
        return made
    return [made[at] for at in sorted({0, *random.Random(seed).sample(range(1, len(made)), count - 1)})]


def in_form(sample: SampleInput, form: str) -> SampleInput:
    """Return `sample` unchanged ("plain"), with non-contiguous tensors ("holes"), transposed ("transposed"), or with
    special values ("special")."""
    change = {"holes": _holes, "transposed": _transposed, "special": _special}.get(form)
    return sample if change is None else sample.transform(change)


def _holes(leaf: Any) -> Any:
    return noncontiguous_like(leaf) if isinstance(leaf, Tensor) and leaf.layout == torch.strided else leaf


def _transposed(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.dim() < 2:
        return leaf
    order = list(reversed(range(leaf.dim())))
    return leaf.detach().permute(order).contiguous().permute(order).requires_grad_(leaf.requires_grad)


def _special(leaf: Any) -> Any:
    """Return the tensor with about a third of its floats replaced by infinities, NaN, zeros of both signs, 1 or -1."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or not leaf.is_floating_point():
        return leaf
    generator = torch.Generator().manual_seed(leaf.numel())
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0])
    drawn = values[torch.randint(len(values), leaf.shape, generator=generator)].to(leaf)
    changed = torch.rand(leaf.shape, generator=generator).to(leaf.device) < 1 / 3
    return torch.where(changed, drawn, leaf.detach()).requires_grad_(leaf.requires_grad)


def check(
    function: Callable[..., Any],
    sample: SampleInput,
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
    name: str = "",
) -> str:
    """Raise Differs if results, gradients or mutations of `compiled(function)` and `function` differ for `sample`.

    Returns "skip" if eager refuses the sample, else "". Errors of the compiled run are not caught.
    """
    try:
        expected = run(function, sample)
    except FAILURES:  # eager does not support the sample in this dtype: nothing to compare with
        return "skip"
    call = compiled(function)
    found = run(call, sample)
    if name in UNINITIALIZED:
        _same_metadata(found, expected)
        return ""
    try:
        compare(found, expected, lambda: run(function, sample, torch.float64))
    except Differs:
        if not _is_low_precision(sample):
            raise
        compare_nearby(function, call, sample)
    return ""


def compare_nearby(function: Callable[..., Any], call: Callable[..., Any], sample: SampleInput) -> None:
    """Raise Differs unless the errors of `call` on samples near `sample` are within twice those of `function`."""
    generator = torch.Generator().manual_seed(3)
    worst: dict[int, list[float]] = {}  # leaf -> our largest error, eager's largest error, largest magnitude
    for _ in range(NEIGHBOURS):
        near = _moved(sample, generator)
        runs = (run(call, near), run(function, near), run(function, near, torch.float64))
        _same_metadata(runs[0], runs[1])
        for at, leaves in enumerate(zip(*map(pytree.tree_leaves, runs), strict=True)):
            if not isinstance(leaves[0], Tensor):
                continue
            ours, eager, true = (leaf.detach().double() for leaf in leaves)
            known = worst.setdefault(at, [0.0, 0.0, 0.0])
            for which, number in enumerate(((ours - true).abs(), (eager - true).abs(), true.abs())):
                assert bool(torch.isfinite(number).all()), "errors of values that are not finite cannot be compared"
                known[which] = max(known[which], number.max().item() if number.numel() else 0.0)
    for ours_off, eager_off, size in worst.values():
        if ours_off > 2 * eager_off + 1.3e-6 * size + 1e-5:
            raise Differs(f"off by {ours_off:.2g} near the sample, eager by {eager_off:.2g}")


def _is_low_precision(sample: SampleInput) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return bool(tensors) and all(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)


def _moved(sample: SampleInput, generator: torch.Generator) -> SampleInput:
    """Return `sample` with each floating-point number multiplied by 1 + n * eps, n drawn from -2 to 2."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            return leaf
        moved = copied(leaf).detach()
        storage = moved.untyped_storage()
        flat = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
            storage, 0, (storage.nbytes() // leaf.itemsize,), (1,)
        )
        steps = torch.randint(-2, 3, flat.shape, generator=generator).to(leaf.device)
        flat.mul_(1 + steps * torch.finfo(leaf.dtype).eps)
        return moved.requires_grad_(leaf.requires_grad)

    moved = copy.copy(sample)
    moved.input, moved.args, moved.kwargs = pytree.tree_map(
        move, (sample.input, tuple(sample.args), dict(sample.kwargs))
    )
    return moved


def run(function: Callable[..., Any], sample: SampleInput, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Call `function` on copies of the sample's tensors; return results, gradients, and arguments after the call."""
    arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
    arguments = pytree.tree_map(lambda leaf: copied(leaf, dtype), arguments)
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    first, rest, named = arguments
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = function(first, *rest, **named)
    outputs = pytree.tree_leaves(sample.output_process_fn_grad(result))
    differentiable = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
    gradients: Sequence[Any] = ()
    if differentiable and wanted:
        tangents = [_tangent(leaf) for leaf in differentiable]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=True)
    return {"results": result, "gradients": list(gradients), "arguments": [tensor.detach() for tensor in tensors]}


def copied(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of a tensor with the same layout, which is a leaf and requires a gradient if the original does;
    return other values unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    copy = leaf.detach().clone()
    if leaf.layout == torch.strided and not leaf.is_conj() and not leaf.is_neg():
        # Copy the whole storage, because `as_strided` may read memory outside of the tensor.
        storage = leaf.untyped_storage().clone()
        empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        copy = empty.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())
    if dtype is not None and leaf.is_floating_point():
        copy = copy.to(dtype)
    return copy.requires_grad_(leaf.requires_grad)


def _tangent(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    made = torch.rand(output.shape, generator=generator, dtype=torch.float64) + 0.5
    # The same numbers in every dtype, so that a float64 run is a reference for a bfloat16 run.
    return made.to(torch.bfloat16).to(device=output.device, dtype=output.dtype)


def compare(found: Any, expected: Any, exact: Callable[[], Any]) -> None:
    """Raise Differs unless `found` is close to `expected`, or at most twice as far from `exact()` as `expected` is."""
    try:
        torch.testing.assert_close(found, expected, equal_nan=True, check_stride=False)
        return
    except AssertionError as error:
        difference = error
    _same_metadata(found, expected)
    try:
        reference = exact()
    except FAILURES:  # there is no float64 kernel, so eager is the only reference
        raise Differs(_line(difference)) from None
    leaves = zip(*(pytree.tree_leaves(tree) for tree in (found, expected, reference)), strict=True)
    for ours, eager, true in leaves:
        if not isinstance(ours, Tensor):
            if ours != eager and not (ours != ours and eager != eager):
                raise Differs(_line(difference))
            continue
        ours, eager, true = (leaf.to_dense() if leaf.layout != torch.strided else leaf for leaf in (ours, eager, true))
        if not (ours.is_floating_point() or ours.is_complex()):
            if not torch.equal(ours, eager):
                raise Differs(_line(difference))
            continue
        wide = torch.complex128 if ours.is_complex() else torch.float64
        ours, eager, true = (leaf.detach().to(wide) for leaf in (ours, eager, true))
        odd = ~torch.isfinite(eager) | ~torch.isfinite(true) | ~torch.isfinite(ours)
        if not torch.equal(torch.nan_to_num(ours[odd]), torch.nan_to_num(eager[odd])):
            raise Differs(_line(difference))
        if odd.all():
            continue
        error_of_ours, error_of_eager = ((leaf - true)[~odd].abs().max().item() for leaf in (ours, eager))
        size = true[~odd].abs().max().item()
        if error_of_ours > 2 * error_of_eager + 1.3e-6 * size + 1e-5:
            raise Differs(f"{_line(difference)}; off by {error_of_ours:.2g}, eager by {error_of_eager:.2g}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _same_metadata(found: Any, expected: Any) -> None:
    ours, structure = pytree.tree_flatten(found)
    theirs, wanted = pytree.tree_flatten(expected)
    if structure != wanted:
        raise Differs(f"structure {structure} instead of {wanted}")
    for mine, other in zip(ours, theirs, strict=True):
        if type(mine) is not type(other):
            raise Differs(f"{type(mine).__name__} instead of {type(other).__name__}")
        if isinstance(mine, Tensor) and (mine.shape, mine.dtype) != (other.shape, other.dtype):
            raise Differs(f"{mine.dtype}{list(mine.shape)} instead of {other.dtype}{list(other.shape)}")


# --- classifying a sample


def compiled_by(backend: Any, dynamic: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that compiles a function with `backend`, discarding everything that Dynamo compiled before."""

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(lambda *args, **kwargs: function(*args, **kwargs), backend=backend, dynamic=dynamic)

    return compile_


def classify(op: OpInfo, sample: SampleInput, dynamic: bool, options: dict[str, Any] | None = None) -> Outcome:
    """Run `sample` in eager and with overlapc; on failure also with `aot_eager`, to see whether torch itself fails."""

    def ours(gm: Any, inputs: Any) -> Any:
        return backend(gm, inputs, options={"fallback_random": True, **(options or {})})

    name = full_name(op)
    try:
        with time_limit(SECONDS_PER_SAMPLE):
            skipped = check(op.op, sample, compiled_by(ours, dynamic), name)
        return Outcome("skip" if skipped else "pass")
    except TimeoutError as error:
        failure = Outcome("raises", f"TimeoutError: {error}")
    except Differs as error:
        failure = Outcome("differs", str(error))
    except FAILURES as error:
        failure = Outcome("raises", f"{type(error).__name__}: {first_lines(error)}")
    try:
        with time_limit(SECONDS_PER_SAMPLE):
            check(op.op, sample, compiled_by("aot_eager", dynamic), name)
    except FAILURES as error:
        return Outcome("eager", f"{failure.kind}: {failure.reason[:150]} | aot_eager: {type(error).__name__}")
    return failure


def first_lines(error: BaseException, count: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "raised:" not in line]
    return " / ".join(lines[:count])[:500]


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block takes more than `seconds` (main thread only)."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
