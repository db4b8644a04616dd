"""Dynamo's settings, and its records of its compilations."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import fx
from torch._logging._internal import log_state

from overlapc.errors import CompileError
from overlapc.stack_room import has_stack_room, with_stack_room

_numberings = itertools.count()
_frames_with_collectives: set[tuple[int, int | None]] = set()  # (`frame_numbering`, Dynamo's number of the frame)
_traced_again: WeakSet[torch._guards.CompileContext] = WeakSet()  # compilations of `trace_with_symbolic_sizes`


def never_compiled_alone(function: Callable[..., Any]) -> None:
    """Let Dynamo trace `function` within its callers only, and never as a graph of its own."""
    from torch._dynamo.eval_frame import skip_code  # here, because importing Dynamo takes a second

    skip_code(function.__code__)


def compiled_alike(compiled: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled with the arguments with which torch.compile made `compiled`.

    Raises ValueError where these are unknown: `compiled` is no result of torch.compile, or loads a stored trace.
    """
    read = getattr(compiled, "get_compiler_config", None)
    compiler = None if read is None else inspect.getclosurevars(read).nonlocals.get("self")
    if compiler is None or compiler._package is not None:
        raise ValueError("made with unknown arguments")
    made: Callable[..., Any] = compiler(function)
    return made


def trace_with_symbolic_sizes(dims: Sequence[tuple[fx.Node, int]]) -> None:
    """Let Dynamo trace the present frame again, with these sizes of its inputs symbolic: raise its exceptions for that.

    They become symbolic as if they had changed since an earlier call, and so in all later graphs of the function, too.
    Do nothing if none may, as with `torch.compile(..., dynamic=False)`, or if this frame was traced again before.
    """
    from torch._dynamo import config, exc, pgo  # here, because importing Dynamo takes a second
    from torch._dynamo.symbolic_convert import InstructionTranslator

    context = torch._guards.CompileContext.try_get()
    if context is None or context in _traced_again or not config.automatic_dynamic_shapes:
        return
    _traced_again.add(context)
    for node, dim in dims:
        name: Any = node.meta["grapharg"].source.name
        if not isinstance(name, str):  # torch 2.11
            name = name()
        size: Any = [pgo.auto_unset] * node.meta["example_value"].dim()
        size[dim] = pgo.auto_dynamic
        changed = pgo.FrameStateSizeEntry.make_size(tuple(size))
        known: Any = pgo.update_automatic_dynamic(InstructionTranslator.current_tx(), name, changed)
        known.excluded_sizes = None  # torch 2.13 would leave the size so far to the graph that was compiled for it

    class Again(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
        """Passes from a backend to Dynamo like the first, and makes it forget what it found like the second."""

    raise Again(restart_reason="ranks have inputs of different sizes")


def skip_calls_of(functions: Iterable[Callable[..., Any]]) -> None:
    """Make Dynamo skip calls of functions that log messages.

    torch 2.11 fails to write its configuration to its log if that names functions, and prints the error at each
    compilation; it then writes it without them.
    """
    from torch._dynamo import config, utils  # here, because importing Dynamo takes a second

    config.ignore_logging_functions.update(functions)
    written = utils._get_dynamo_config_for_logging
    try:
        written()
    except TypeError:

        def without_functions() -> str | None:
            with config.patch(ignore_logging_functions=set()):
                return written()

        utils._get_dynamo_config_for_logging = without_functions


def compiled_autograd(gm: Any) -> bool:
    """Whether compiled autograd traced `gm`, or will trace its backward: it supports only AOTAutograd's own functions.

    A backward that it traced takes its inputs in lists, and is passed in a wrapper that is not a GraphModule.
    """
    from torch._dynamo import compiled_autograd as autograd
    from torch._dynamo import config

    return not isinstance(gm, fx.GraphModule) or config.compiled_autograd or autograd.compiled_autograd_enabled


def name_lines_only_in_logs() -> None:
    """Let Dynamo look for the function around a line only if it logs its trace.

    Without this, Dynamo tokenizes the whole source file of each function that it traces, to name that function in a log
    that is off by default (`TORCH_LOGS=trace_call`). Tokenizing torch/nn/functional.py takes 40 ms of CPU time.
    """
    from torch._dynamo import symbolic_convert  # here, because importing Dynamo takes a second

    dynamo: Any = symbolic_convert
    look_up = dynamo.get_funcname
    if hasattr(look_up, "__wrapped__"):
        return

    @wraps(look_up)
    def function_at(filename: str, line: int) -> str | None:
        logged = any(map(log_state.is_artifact_enabled, ("trace_call", "trace_source")))
        return look_up(filename, line) if logged else None

    dynamo.get_funcname = function_at


def compile_with_stack_room() -> None:
    """Let Dynamo trace and compile each frame with room on Python's stack."""
    from torch._dynamo import convert_frame  # here, because importing Dynamo takes a second

    dynamo: Any = convert_frame
    if not has_stack_room(dynamo._compile):
        dynamo._compile = with_stack_room(dynamo._compile)


def note_collectives() -> None:
    """Note that graphs of the frame being compiled communicate; do nothing outside of Dynamo."""
    compiled = torch._guards.CompileContext.current_compile_id()
    if compiled is not None:
        _frames_with_collectives.add((frame_numbering(), compiled.frame_id))


def compile_collectives_beyond_limit() -> None:
    """Let Dynamo's `recompile_limit` not apply to frames with collectives.

    Dynamo runs a frame eagerly once it has compiled that many graphs of it. Ranks get there at different times, because
    their sizes change independently, and an eager frame does not launch its collectives in the order of the graphs that
    other ranks run.
    """
    from torch._dynamo import config, convert_frame  # here, because importing Dynamo takes a second

    dynamo: Any = convert_frame
    exceeds = dynamo.exceeds_recompile_limit
    if hasattr(exceeds, "__wrapped__"):
        return

    @wraps(exceeds)
    def exceeds_without_collectives(cache_size: Any, compiled: torch._guards.CompileId) -> tuple[bool, str]:
        exceeded, limit = exceeds(cache_size, compiled)
        frame = frame_numbering(), compiled.frame_id
        if not exceeded or frame not in _frames_with_collectives or config.fail_on_recompile_limit_hit:
            return exceeded, limit
        communicates = "it communicates, and other ranks may run compiled graphs of it"
        hint = "TORCH_LOGS=recompiles shows why; pad inputs to fewer sizes, or compile without dynamic=False"
        if limit != "recompile_limit":
            raise CompileError(
                f"Dynamo does not compile {compiled}, one more graph of a function, because of"
                f" torch._dynamo.config.{limit} ({getattr(config, limit)}), and overlapc does not let the function run"
                f" eagerly: {communicates}\nhint: {hint}, or raise the limit"
            )
        if cache_size.num_cache_entries_with_same_id_matched_objs == config.recompile_limit:
            warnings.warn(
                f"overlapc lets Dynamo compile a function more than {config.recompile_limit} times"
                f" (torch._dynamo.config.recompile_limit) instead of running it eagerly: {communicates}\nhint: {hint}",
                stacklevel=2,
            )
        return False, ""

    dynamo.exceeds_recompile_limit = exceeds_without_collectives


def no_guards_on_equal_meshes() -> None:
    """Let Dynamo not guard on DTensors having their mesh object in common (torch 2.13): a guard on each DTensor's spec
    compares meshes, and the others are Python code that runs in every call, one attribute access for each parameter.
    """
    from torch._dynamo.source import AttrSource  # here, because importing Dynamo takes a second
    from torch._dynamo.variables import builder

    dynamo: Any = builder
    guard_of = dynamo.make_dupe_guard
    if hasattr(guard_of, "__wrapped__"):
        return

    @wraps(guard_of)
    def guard_unless_meshes(source: Any, other: Any) -> Any:
        meshes = all(isinstance(each, AttrSource) and each.member == "device_mesh" for each in (source, other))
        return None if meshes else guard_of(source, other)

    dynamo.make_dupe_guard = guard_unless_meshes


def compile_reads_of_sources_once() -> None:
    """Let Dynamo compile each expression with which it reads sources once.

    It evaluates `tmp.weight` or `tmp['0']`, as text, for each source in each of its caches of values: with 32 equal
    layers the same hundred expressions 20,000 times.
    """
    guards: Any = torch._guards
    if hasattr(guards, "eval"):
        return
    compiled = lru_cache(maxsize=4096)(partial(compile, filename="<string>", mode="eval"))

    def evaluated(expression: str, in_globals: dict[str, Any], in_locals: dict[str, Any]) -> Any:
        return eval(compiled(expression), in_globals, in_locals)

    guards.eval = evaluated  # hides the builtin from this one module of torch


@dataclass(frozen=True)
class Traced:
    """One compilation of one frame by Dynamo."""

    compile_id: str  # "0/1": frame 0, its second compilation
    function: str
    source: str  # file:line
    recompiled: str  # the guard of an earlier compilation that failed; "" for the first
    seconds: float  # without the time spent in the backend


@dataclass(frozen=True)
class Broken:
    """One graph break."""

    source: str  # file:line
    code: str
    reason: str


def compile_id() -> str:
    """Return the id of Dynamo's current compilation as in its logs; "" outside of compilations."""
    return str(torch._guards.CompileContext.current_compile_id() or "")


def frame_numbering() -> int:
    """Return a number that only `torch._dynamo.reset()` changes, after which Dynamo numbers frames from 0 again.

    It is stored among Dynamo's counts of compilations, because a reset clears these. Frame numbers do not show a reset:
    a backward is compiled under the number of its forward, often after forwards with larger numbers.
    """
    from torch._dynamo import convert_frame  # here, because importing Dynamo takes a second

    counts: dict[Any, int] = convert_frame.FRAME_COMPILE_COUNTER
    return counts.setdefault("overlapc", next(_numberings))


def traced() -> list[Traced]:
    """Return torch's records of its last 64 compilations, in order."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        Traced(
            str(each.compile_id),
            each.co_name,
            f"{each.co_filename}:{each.co_firstlineno}",
            _failed_guard(each.recompile_reason or ""),
            max(0.0, (each.entire_frame_compile_time_s or 0.0) - (each.backend_compile_time_s or 0.0)),
        )
        for each in get_compilation_metrics()
        if each.co_name is not None  # None: a backward graph, compiled when it first ran
    ]


def _failed_guard(reason: str) -> str:
    """Return the guard and its line of code in one line, without the compilation's id and the stack that torch adds."""
    guard = reason.partition("User stack trace:")[0]
    return re.sub(r"^\d+/\d+: ", "", " ".join(guard.split()))


def ends_in_break(gm: Any) -> bool:
    """Whether `gm` ends in a graph break: the code behind the break runs before the backward of `gm`."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def graph_breaks() -> list[Broken]:
    """Return the graph breaks of this process, in the order in which Dynamo recorded them."""
    from torch._dynamo.output_graph import graph_break_reasons

    found = []
    for each in graph_break_reasons:
        reason = next(iter(each.reason.strip().splitlines()), "")
        frame = each.user_stack[-1] if each.user_stack else None
        where = "" if frame is None else f"{frame.filename}:{frame.lineno}"
        code = "" if frame is None else frame.line or ""
        found.append(Broken(where, code, _BREAKS.get(reason.split(" ")[0], reason)))
    return found


# Descriptions of the breaks for which Dynamo gives a name instead of a sentence.
_BREAKS = {
    "generic_jump": "which branch is taken depends on a tensor's value",
    "step_unsupported": "Dynamo does not trace this statement",
}


def assumptions() -> Callable[[], int]:
    """Return a function that counts what was assumed since about symbolic sizes and numbers of the step being compiled.

    Code that is traced meanwhile may have fixed the value of one, as `torch.where(condition, x, number)` does. Dynamo
    guards that, but nothing in the graph that it captured shows it.
    """
    context = torch._guards.TracingContext.try_get()
    shapes: Any = None if context is None or context.fake_mode is None else context.fake_mode.shape_env

    def made() -> int:
        return 0 if shapes is None else len(shapes.guards) + len(shapes.replacements)

    before = made()
    return lambda: made() - before
