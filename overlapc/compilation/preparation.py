"""What overlapc changes in torch before Dynamo traces a model for it."""

from __future__ import annotations

import inspect
import logging
from functools import cache
from types import FunctionType, ModuleType

from overlapc.config import Config
from overlapc.fx.versions.dynamo import (
    compile_collectives_beyond_limit,
    compile_reads_of_sources_once,
    compile_with_stack_room,
    name_lines_only_in_logs,
    never_compiled_alone,
    no_guards_on_equal_meshes,
    skip_calls_of,
)
from overlapc.fx.versions.tensors import initialize_gpus_once
from overlapc.gc_paused import pause_while_compiling
from overlapc.when_imported import when_imported

_trace_once = False  # whether any `torch.compile` so far had this option on


def prepare_torch(config: Config) -> None:
    """Change torch and Dynamo for compiling with overlapc; further calls change nothing more.

    - garbage collection pauses while Dynamo compiles
    - calls of `warning_once` and `info_once` break no graph
    - transformers' functions that make attention masks are traced within their callers only
    - fake tensors initialize each GPU once
    - Dynamo looks up the function around a line only if it logs it
    - Dynamo does not guard that DTensors share a mesh object: guards that their meshes are equal suffice
    - Dynamo compiles each expression by which it reads sources once
    - Dynamo gets room on Python's stack
    - Dynamo runs no function with collectives eagerly because it has compiled many graphs of it
    - models sharded before or after this: equal blocks are traced once (`trace_once`), equal modules share a graph
    """
    pause_while_compiling()
    _skip_messages_logged_once()
    for name in ("transformers.masking_utils", "transformers.utils.import_utils"):
        when_imported(name, _trace_within_callers_only)
    initialize_gpus_once()
    name_lines_only_in_logs()
    no_guards_on_equal_meshes()
    compile_reads_of_sources_once()
    compile_with_stack_room()
    compile_collectives_beyond_limit()
    global _trace_once
    _trace_once |= config.trace_once
    when_imported("overlapc.parallel.access", _prepare_for_sharded_modules)  # whoever shards a model imports it


def _prepare_for_sharded_modules(access: ModuleType) -> None:
    access.prepare_dynamo(_trace_once)


@cache
def _trace_within_callers_only(module: ModuleType) -> None:
    """Let transformers' functions that make attention masks, and those that say whether they are traced, run eagerly
    in a model with graph breaks, where Dynamo would compile them one by one.

    Untraced, they return no mask where attention may be causal; traced, a tensor that the next graph gets as data.
    """
    for function in vars(module).values():
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            never_compiled_alone(function)
            never_compiled_alone(inspect.unwrap(function))


def _skip_messages_logged_once() -> None:
    """Make Dynamo skip calls of a logger's `warning_once` and `info_once`, with which transformers extends loggers.

    Otherwise a message, such as that of gradient checkpointing about `use_cache`, ends the graph amid a model, and
    Dynamo traces all that comes before it once more for each function that it is nested in.
    """
    methods = [getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")]
    added = [method for method in methods if method is not None]
    if added:
        skip_calls_of(added)
