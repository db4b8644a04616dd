"""Compares a model with eager, forward and backward: results, gradients and buffers of two calls.

The model is in training mode. A weighted sum of all elements of floating-point results, each element with its own
weight, is differentiated by parameters and inputs. The reference is eager in float64, or eager in the same dtype for a
model that draws random numbers which are others in float64. An error is relative to the largest element of its tensor,
or to `_FLOOR` times the largest element of all tensors (some gradients are zero except for rounding). A model is right
if its largest error is at most 4 times eager's, or at most what `ALLOWED` says. Batch norm over few elements turns
rounding into large differences in float32, but not in float64. With any backend a graph break may turn a gradient of
None into zeros, which is right, and the line says so. For a model that is not right, the line also has Inductor's
error. A model that fails in eager mode is "no case"; one that only fails when it is compiled has "failed", and the line
says what Inductor does.

With several ranks each has inputs of its own, and the model is sharded for eager and for compilers, but not for the
reference: its gradients are averaged over ranks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import overlapc

# A relative error up to this is right, whatever eager's error is. Some models compute a part in float32 in any case.
ALLOWED = {"bfloat16": 5e-2, "float32": 3e-4, "float64": 1e-5}
_FLOOR = 1e-4
_SEED = 1  # of each call
_OTHER_NUMBERS = 0.1  # an error of eager above this comes from other random numbers in float64, if the model draws any
_GRADIENT = "gradient of parameter "  # begins the name of a gradient that is averaged over ranks
_CALL = "fallback "  # begins the name of the counter of an op without generated code

Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # module, inputs by position and by name


def judged(
    name: str,
    build: Callable[[], Model],
    dtype: torch.dtype,
    device: str,
    dynamic: bool | None = None,
    shard: Callable[[nn.Module], object] | None = None,
    computes_in: torch.dtype | None = None,
) -> str:
    """Return the line about one model: the verdict, errors, CPU seconds of compilation and both calls, and the ops
    without generated code, which stay calls.

    dynamic: as torch.compile's option; True makes all sizes symbolic.
    shard: applies FSDP2 to a module. computes_in: the dtype that this casts parameters to, if it is not `dtype`.
    """
    torch.manual_seed(0)

    def cast(dtype: torch.dtype, sharded: bool = True) -> Model:
        def of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)

        model = copy.deepcopy(module).to(device, dtype)
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products take no float64
        if shard is not None and sharded:
            shard(model)
        return model, tuple(map(of, given)), {key: of(value) for key, value in named.items()}

    def compiled(backend: str) -> tuple[dict[str, Tensor | None], float]:
        torch.compiler.reset()
        counters.clear()
        made, begun = cast(dtype), time.process_time()
        options = {"fallback_random": True}
        if shard is not None and backend == "overlapc":
            overlapc.adopt_fsdp2(made[0])
        call = torch.compile(made[0], backend=backend, options=options, dynamic=dynamic)
        numbers = _numbers(made[0], call, made)
        return numbers, time.process_time() - begun

    try:
        module, given, named = build()
        module.train()
        exact, eager = cast(torch.float64, sharded=False), cast(dtype)
        truth = _numbers(exact[0], exact[0], exact)
        if shard is not None:
            truth = _averaged(truth)
        eager_numbers = _numbers(eager[0], eager[0], eager)
        draws = _has_drawn(device)
        eager_error, _ = _error(eager_numbers, truth)
        by_eager = draws and eager_error > _OTHER_NUMBERS
        if by_eager:
            truth, eager_error = eager_numbers, 0.0
    except Exception as error:  # noqa: BLE001 whatever the package or the model raises for our sizes
        return _no_case(name, f"{type(error).__name__}: {error}")
    if eager_error == float("inf"):
        return _no_case(name, "in eager mode, other numbers are finite than in float64")
    try:
        numbers, seconds = compiled("overlapc")
    except TimeoutError:
        raise
    except Exception as failure:  # noqa: BLE001 an exception of any kind is a finding
        return f"failed {name:48} {_summary(failure)}; {_of_inductor(compiled, truth)}"
    calls = ", ".join(key.removeprefix(_CALL) for key in counters["overlapc"] if key.startswith(_CALL))
    error, where = _error(numbers, truth)
    right = error <= max(4 * eager_error, ALLOWED[str(computes_in or dtype).removeprefix("torch.")])
    line = f"{'right' if right else 'WRONG':6}{name:48} error {error:.1e}, eager {eager_error:.1e}, {seconds:.1f} s"
    line += ", reference: eager" if by_eager else ""
    line += f", calls {calls}" if calls else ""
    zeros = sum(_is_zero_for_none(numbers[name], truth[name]) for name in truth.keys() & numbers.keys())
    line += f", {zeros} gradients zero instead of None" if zeros else ""
    if right:
        return line
    return f"{line}, at {where}; {_of_inductor(compiled, truth)}"


def verdict(line: str) -> str:
    """Return the verdict with which a line of `judged` begins; "ended" if there is none."""
    return next((verdict for verdict in ("right", "WRONG", "failed", "no case") if line.startswith(verdict)), "ended")


def _no_case(name: str, why: str) -> str:
    return f"no case {name:46} {' '.join(why.split())[:120]}"


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _of_inductor(compiled: Callable[[str], Any], truth: dict[str, Tensor | None]) -> str:
    try:
        numbers, _ = compiled("inductor")
    except Exception as failure:  # noqa: BLE001 any exception says that Inductor fails, too
        return f"Inductor: {_summary(failure)[:100]}"
    return f"Inductor {_error(numbers, truth)[0]:.1e}"


def _numbers(model: nn.Module, call: Callable[..., Any], made: Model) -> dict[str, Tensor | None]:
    """Return results, gradients and buffers of two calls, as float64 in the CPU's memory, by name."""
    numbers: dict[str, Tensor | None] = {}
    for step in range(2):
        model.zero_grad(set_to_none=True)
        given = [_leaf(value) for value in made[1]]
        named = {name: _leaf(value) for name, value in made[2].items()}
        torch.manual_seed(_SEED)
        results = [
            x for x in tree_leaves(_plain(call(*given, **named))) if isinstance(x, Tensor) and x.is_floating_point()
        ]
        weighted = (
            x * torch.linspace(-0.5, 1, x.numel(), dtype=x.dtype).to(x.device).reshape(x.shape) for x in results
        )
        loss = torch.stack([x.sum() for x in weighted]).sum()
        if loss.requires_grad:
            loss.backward()
        numbers |= {f"result {at}, call {step}": x for at, x in enumerate(results)}
        numbers |= {f"{_GRADIENT}{name}, call {step}": _whole(p.grad) for name, p in model.named_parameters()}
        inputs = [x for x in (*given, *named.values()) if isinstance(x, Tensor)]
        numbers |= {f"gradient of input {at}, call {step}": x.grad for at, x in enumerate(inputs)}
        numbers |= {f"buffer {name}, call {step}": b for name, b in model.named_buffers()}
    return {name: None if x is None else x.detach().cpu().double().clone() for name, x in numbers.items()}


def _has_drawn(device: str) -> bool:
    """Whether the last call drew random numbers on the device."""
    state = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    after = state()
    torch.manual_seed(_SEED)
    return not torch.equal(after, state())


def _is_zero_for_none(found: Tensor | None, expected: Tensor | None) -> bool:
    return expected is None and found is not None and not found.any()


def _averaged(numbers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return `numbers` with gradients of parameters averaged over ranks; None counts as zeros if a rank has others."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {name: x for name, x in numbers.items() if name.startswith(_GRADIENT)})
    averages = dict(numbers)
    for name in of_ranks[0]:
        found = [each[name] for each in of_ranks if each[name] is not None]
        averages[name] = torch.stack(found).sum(0) / len(of_ranks) if found else None
    return averages


def _whole(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _plain(result: Any) -> Any:
    return result.to_tuple() if hasattr(result, "to_tuple") else result


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone().requires_grad_() if value.is_floating_point() else value.clone()


def _error(numbers: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> tuple[float, str]:
    """Return the largest relative error, and the name of the tensor that has it."""
    worst = (0.0, "")
    largest = max(float(x[x.isfinite()].abs().max()) for x in truth.values() if x is not None and x.isfinite().any())
    if numbers.keys() != truth.keys():
        return float("inf"), f"only one has {sorted(numbers.keys() ^ truth.keys())[0]}"
    for name, expected in truth.items():
        found = numbers[name]
        if found is None or expected is None:
            error = 0.0 if found is expected or _is_zero_for_none(found, expected) else float("inf")
        elif found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
            error = float("inf")
        else:
            finite = expected.isfinite()
            differences, elements = (found - expected)[finite].abs(), expected[finite].abs()
            error = float(differences.max()) / max(float(elements.max()), _FLOOR * largest) if len(elements) else 0.0
        worst = max(worst, (error, name))
    return worst
