"""`overlapc plan train.py`: plans the step of a user's script on any number of ranks, in one process without a GPU.

The script runs as rank 0 of the job, on fake tensors and torch's fake process group, up to its first optimizer step
(first_update.py). Everything that it compiles until then, with any backend, is planned (planned_compile.py). Meanwhile
CUDA devices are replaced by the CPU, and values of tensors are unknown (without_gpus.py).
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from overlapc.config import Config
from overlapc.errors import ConfigError, MemoryBudgetError, OverlapcError
from overlapc.launch.environment import environment
from overlapc.launch.first_update import FirstUpdate, Stepped
from overlapc.launch.planned_compile import PlannedCompile, fsdp2_manages
from overlapc.launch.without_gpus import NOT_THE_SCRIPT, gpus
from overlapc.report import record
from overlapc.report.record import Report
from overlapc.runtime.steps import STEPS

_NEEDS_VALUES = (
    "a branch or a shape depends on the values of tensors here, and the script runs on tensors without values: plan a"
    " variant of it that needs no values (a fixed capacity, no check of the loss), or move this after the first"
    " optimizer step"
)
_NEEDS_MORE = (
    "up to its first optimizer step, the script runs on tensors without values and without other ranks; code that"
    " needs either (evaluation, checkpoints, object collectives) must come after that step"
)


def plan_script(
    path: Path, arguments: Sequence[str], world_size: int, per_host: int, options: Config
) -> tuple[Report, list[str]]:
    """Plan a script. Return the report of rank 0's first step, and the assumptions that were made about the script.

    per_host: the number of ranks per host that the script sees. options: override those that the script gives to
    overlapc. ConfigError for a script that fails, or that compiles nothing before its first optimizer step;
    MemoryBudgetError if no plan fits into its budget.
    """
    if dist.is_initialized():
        raise ConfigError("planning needs a separate process: this one already has a process group")
    if not path.is_file():
        raise ConfigError(f"no script {path}")
    torch._dynamo.reset()
    record.clear()
    local = min(per_host, world_size)
    variables = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }  # fmt: skip
    update, compiles = FirstUpdate(), PlannedCompile(options)
    try:
        with (
            gpus(world_size, local) as machine,
            compiles.instead_of_torch(update.modules),
            update.watched(),
            _as_main(path, arguments),
            environment(variables),
        ):
            _run(path)
            (step,) = record.report_of_process().steps
        calls = update.calls or {graph.name: STEPS.counts[graph.name][0] for graph in step.graphs}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if not step.graphs:
        raise ConfigError(f"{path} compiles nothing before its first optimizer step: it needs torch.compile(model)")
    zeros = ", ".join(machine.zeros)
    if zeros and compiles.given_empty:
        raise ConfigError(
            f"{path} calls a compiled graph with a tensor that has no elements. In a plan, integers that a script reads"
            f" from tensors are 0, and here one of them is a size: {zeros}\n"
            "hint: for the plan, write that size as a number"
        )
    assumptions = []
    if compiles.options_of_script:
        assumptions.append(f"options of the script: {', '.join(compiles.options_of_script)}")
    if compiles.adopted:
        assumptions.append("FSDP2 is adopted, as by model = overlapc.adopt_fsdp2(model)")
    if compiles.by_blocks:
        assumptions.append(
            f"{sum(compiles.by_blocks)} modules that the script compiles one by one are planned with the FSDP2 module"
            " around them as one graph, because their own graphs contain no communication"
        )
    if zeros:
        assumptions.append(f"integers that the script reads from tensors, such as indices, are 0 ({zeros})")
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in update.modules):
        assumptions.append("SyncBatchNorm is planned as BatchNorm, without the small reductions of its statistics")
    assumptions += [f"{name}.step calls its closure once" for name in update.closures]
    assumptions += [f"optimizer state is not counted for {reason}" for reason in update.not_counted]
    if any(map(fsdp2_manages, update.modules)):
        assumptions.append(
            "FSDP2 modules that a compiled function calls are not in the plan, because FSDP2's hooks break its graph:"
            " compile the model itself, or call model = overlapc.adopt_fsdp2(model) before"
        )
    elif world_size > 1 and not any(graph.collectives for graph in step.graphs):
        assumptions.append(
            f"no communication between {world_size} ranks, because no compiled graph contains any: the script did not"
            " shard its model here (some trainers do so only if they find a GPU)"
        )
    step = replace(step, world_size=world_size, calls=calls, update_peak_bytes=update.peak_bytes)
    return Report((step,)), assumptions


def _run(path: Path) -> None:
    try:
        with torch.random.fork_rng(devices=()), FakeTensorMode(allow_non_fake_inputs=True):
            torch.manual_seed(0)  # random indices into the script's data are the same in each plan
            exec(compile(path.read_bytes(), str(path), "exec"), _MAIN.__dict__)
    except Stepped:
        pass
    except MemoryBudgetError:
        raise  # a point of a sweep without a plan
    except SystemExit as left:
        if left.code:
            raise ConfigError(f"{path} ended with {left.code!r} before its first optimizer stepped") from None
    except Exception as error:
        raise ConfigError(_failed(path, error)) from error


def _failed(path: Path, error: Exception) -> str:
    """Return the message for an error of a script, with the innermost line outside of torch and overlapc."""
    last = _last_frame(error)
    inner = getattr(error, "inner_exception", error)
    where = f"{path}: {last.filename}:{last.lineno}"
    if isinstance(inner, OverlapcError):  # it says what to do
        return f"{where}: {inner}"
    if isinstance(inner, SyntaxError):
        return "".join([f"{path}:\n", *traceback.format_exception_only(inner)]).rstrip()
    first = next(iter(str(inner).strip().splitlines()), "")
    needs_values = isinstance(inner, DataDependentOutputException | DynamicOutputShapeException)
    return (
        f"{where}: {type(inner).__name__}: {first}\n   {last.line}\n"
        f"hint: {_NEEDS_VALUES if needs_values else _NEEDS_MORE}"
    )


def _last_frame(error: Exception) -> traceback.FrameSummary:
    """Return the innermost frame outside of torch and overlapc, or the innermost of all if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (*NOT_THE_SCRIPT, contextlib.__file__)
    return ([frame for frame in frames if not frame.filename.startswith(others)] or frames)[-1]


_MAIN = ModuleType("__main__")  # the same module for every script, because Dynamo caches modules by name


@contextlib.contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set up `sys.argv`, `sys.path` and `__main__` as for `python script` inside the block; drop the script's imports
    afterwards."""
    folder = path.resolve().parent
    argv, folders, main, known = sys.argv, list(sys.path), sys.modules["__main__"], set(sys.modules)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(folder))
    _MAIN.__dict__.clear()
    _MAIN.__dict__.update(__name__="__main__", __file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = _MAIN
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, folders, main
        for name in [name for name in sys.modules if name not in known and _is_of(folder, sys.modules[name])]:
            del sys.modules[name]  # it may hold the world size of this plan


def _is_of(folder: Path, module: ModuleType) -> bool:
    """Whether a module is a file in the script's folder, and neither an installed one nor ours."""
    file = Path(getattr(module, "__file__", None) or "/")
    return folder in file.parents and "site-packages" not in file.parts and not str(file).startswith(NOT_THE_SCRIPT)
