"""What overlapc changes in torch before Dynamo traces a model for it."""

from __future__ import annotations

import logging
from types import ModuleType

from overlapc.config import Config
from overlapc.fx.versions.dynamo import (
    compile_with_stack_room,
    name_lines_only_in_logs,
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
    - fake tensors initialize each GPU once
    - Dynamo looks up the function around a line only if it logs it
    - Dynamo does not guard that DTensors share a mesh object: guards that their meshes are equal suffice
    - Dynamo gets room on Python's stack
    - models sharded before or after this: equal blocks are traced once (`trace_once`), equal modules share a graph
    """
    pause_while_compiling()
    _skip_messages_logged_once()
    initialize_gpus_once()
    name_lines_only_in_logs()
    no_guards_on_equal_meshes()
    compile_with_stack_room()
    global _trace_once
    _trace_once |= config.trace_once
    when_imported("overlapc.parallel.access", _prepare_for_sharded_modules)  # whoever shards a model imports it


def _prepare_for_sharded_modules(access: ModuleType) -> None:
    access.prepare_dynamo(_trace_once)


def _skip_messages_logged_once() -> None:
    """Make Dynamo skip calls of a logger's `warning_once` and `info_once`, with which transformers extends loggers.

    Otherwise a message, such as that of gradient checkpointing about `use_cache`, ends the graph amid a model, and
    Dynamo traces all that comes before it once more for each function that it is nested in.
    """
    methods = [getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")]
    added = [method for method in methods if method is not None]
    if added:
        skip_calls_of(added)
