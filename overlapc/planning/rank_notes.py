"""Notes about a rank's compilation that an error shows where ranks differ: options, variables, versions, steps so far,
inputs of size 0 or 1."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from overlapc.agreement.meeting import STEPS as STEPS_SO_FAR
from overlapc.config import NOT_IN_KEY, Config
from overlapc.runtime.steps import STEPS
from overlapc.runtime.toolchain import triton_version

_PREFIXES = ("OVERLAPC_", "TORCH", "PYTORCH_")
_OF_A_RANK = ("OVERLAPC_RUN_DIR", "OVERLAPC_CACHE_DIR", "TORCHELASTIC_")  # variables that may differ between ranks


def notes_of(gm: GraphModule, config: Config) -> dict[str, str]:
    """Return the notes by name. Options and variables without a note have their defaults."""
    notes = {"version of torch": torch.__version__, "version of Triton": triton_version()}
    notes[STEPS_SO_FAR] = str(STEPS.stepped)
    notes.update(
        (f"variable {name}", value)
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and not name.startswith(_OF_A_RANK)
    )
    for knob in dataclasses.fields(config):
        value = getattr(config, knob.name)
        if knob.name not in NOT_IN_KEY and value != getattr(_default(), knob.name):
            notes[f"option {knob.name}"] = _text(value)
    short = sorted(_short_inputs(gm))
    if short:
        notes["inputs with a size of 0 or 1, for which torch specializes the graph"] = ", ".join(short)
    return notes


def _default() -> Config:
    return Config()


def _short_inputs(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(isinstance(size, int) and size <= 1 for size in value.shape):
            yield str([size if isinstance(size, int) else "s" for size in value.shape])


def _text(value: object) -> str:
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, tuple | frozenset):
        return ",".join(sorted(map(_text, value)) if isinstance(value, frozenset) else map(_text, value)) or "none"
    return str(value)
