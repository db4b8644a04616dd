"""Hash what a compilation depends on besides its graph: options, software, devices and torch's global state."""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from overlapc.codegen.generators import foreign
from overlapc.config import NOT_IN_KEY, Config
from overlapc.runtime.cache import content_key
from overlapc.runtime.toolchain import triton_version
from overlapc.warm.fingerprint import NotCacheable

_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = ("*.py", "*.h", "*.json")


def environment_key(config: Config) -> str:
    """Return the hash, which covers overlapc's own code; raise NotCacheable if functions of others are used."""
    if foreign():
        raise NotCacheable(f"the kernel generator for {', '.join(foreign())} is not part of overlapc")
    return content_key(_code_key(), *_options(config), *_versions(), *_switches())


@functools.cache
def _code_key() -> str:
    """Return a hash of overlapc's own files, including those of the linked folders (passes, estimators)."""
    folders = [_PACKAGE, *(each.resolve() for each in _PACKAGE.iterdir() if each.is_symlink())]
    files = sorted(file for folder in folders for pattern in _CODE for file in folder.rglob(pattern))
    return content_key(*(file.read_bytes() for file in files))


def _passes_are_ours(names: Sequence[str]) -> None:
    from overlapc.passes.runner import is_ours  # imports all passes, and few runs name any

    for name in names:
        if not is_ours(name):
            raise NotCacheable(f"pass {name} is not part of overlapc")


def _options(config: Config) -> Iterator[str]:
    for knob in dataclasses.fields(config):
        if knob.name in NOT_IN_KEY:
            continue
        value = getattr(config, knob.name)
        if callable(value) or (isinstance(value, tuple) and any(callable(each) for each in value)):
            raise NotCacheable(f"option {knob.name} holds a function")
        if knob.name == "passes" and value:
            _passes_are_ours(value)
        if isinstance(value, frozenset):
            value = sorted(value)
        yield f"{knob.name}={value!r}"
        if isinstance(value, str | Path) and Path(value).is_file():  # a profile, an earlier run
            yield Path(value).read_text(encoding="utf-8", errors="replace")


@functools.cache
def _versions() -> tuple[str, ...]:
    return (torch.__version__, str(torch.version.cuda), triton_version(), platform.python_version(), *_devices())


def _devices() -> Iterator[str]:
    yield f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            yield f"{properties.name} {properties.major}.{properties.minor} {properties.multi_processor_count}"


def _switches() -> Iterator[str]:
    """Yield the global state of torch that tracing and decompositions read."""
    yield f"grad={torch.is_grad_enabled()} inference={torch.is_inference_mode_enabled()}"
    yield f"deterministic={torch.are_deterministic_algorithms_enabled()}"
    yield f"dtype={torch.get_default_dtype()} device={torch.get_default_device()}"
    for device in ("cpu", "cuda"):
        yield f"amp {device}={torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    cuda = torch.backends.cuda
    yield f"sdp={cuda.flash_sdp_enabled()} {cuda.mem_efficient_sdp_enabled()} {cuda.math_sdp_enabled()}"
    yield f"cudnn={cuda.cudnn_sdp_enabled()} {torch.backends.cudnn.enabled}"
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    settings = cuda.matmul, cudnn, cudnn.conv, cudnn.rnn, mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn
    precisions = [each.fp32_precision.replace("none", "ieee") for each in settings]  # what "none" means is among them
    yield f"fp32={precisions}"  # read here, because torch's older function raises where these were set
    yield repr(torch._functorch.config.get_hash())
