"""Compare modules from GitHub repositories, as jansel/pytorch-jit-paritybench collected them, with eager.

    git clone https://github.com/jansel/pytorch-jit-paritybench
    python benchmarks/github_modules.py pytorch-jit-paritybench/generated --files 40 --jobs 2
    python benchmarks/github_modules.py pytorch-jit-paritybench/generated --only test_lucid --dtype float32 --dynamic
    python benchmarks/github_modules.py pytorch-jit-paritybench/generated --device cuda --dtype float32 --jobs 12

The collection has 14,000 modules of 2,000 repositories, each with arguments that suit it. compared_models.py says how a
module is compared. A module that eager mode cannot run with this version of torch is "no case"; packages that are not
installed are replaced by mocks, which most modules only import. Each file runs in a process of its own; a module that
ends it, or takes longer than `--seconds`, has "ended", and the next one continues in a new process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from compared_models import ALLOWED, Model, judged, verdict  # beside this file
from torch import nn

_HELPERS = "_paritybench_helpers"  # the module of the collection that every file imports
_GRACE_S = 15  # for a module that is late in a call of C++, which an alarm does not end
_PROCESSES = multiprocessing.get_context("forkserver")
_PACKAGES = frozenset(
    "matplotlib pandas sklearn scipy tensorflow torchaudio torchtext torchvision transformers".split()
)


class MockedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed, and gives each of their names a mock."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a mocked package or a module of it; asked after all other finders."""
        known = name.partition(".")[0] in _PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a module whose missing attributes are mocks."""
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, _: ModuleType) -> None:
        """Do nothing: there is no code."""


class Config(dict[str, Any]):
    """Arguments of a program whose command line is not parsed."""

    __getattr__ = dict.__getitem__


class MockedBlock(nn.ReLU):
    """Stands for a layer that a module gets as an argument."""

    expansion = 1


def mocked_layer(in_features: int | None = None, out_features: int | None = None, *_: Any, **options: Any) -> nn.Module:
    """Return a linear layer of these sizes, or an activation without sizes."""
    return nn.Linear(in_features, out_features, **options) if in_features and out_features else MockedBlock()


def one_namespace() -> None:
    """Give `torch.functional` and `torch.nn.functional` each other's functions: some files import both as `F`."""
    for giver, taker in ((torch.functional, F), (F, torch.functional)):
        for name in [name for name in dir(giver) if name[0].islower() and not hasattr(taker, name)]:
            setattr(taker, name, getattr(giver, name))


def helpers() -> ModuleType:
    """Return what the files of the collection import."""
    module = ModuleType(_HELPERS)
    given = {"_mock_config": Config, "_mock_layer": mocked_layer, "_paritybench_base": object}
    module.__dict__.update(given, patch_functional=one_namespace, _fails_compile=lambda: lambda test: test)
    return module


def cases(file: Path) -> Iterator[tuple[str, Callable[[], Model]]]:
    """Yield the name of each module of a file, and the function that makes it and its arguments."""
    sys.meta_path.append(MockedPackages())
    sys.modules[_HELPERS] = helpers()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for kind, arguments, inputs, _ in getattr(module, "TESTCASES", []):
        yield f"{file.stem.removeprefix('test_')}.{kind.__name__}", functools.partial(_made, kind, arguments, inputs)


def _made(kind: Callable[..., nn.Module], arguments: Callable[[], Any], inputs: Callable[[], Any]) -> Model:
    args, kwargs = arguments()
    by_position, by_name = inputs()
    return kind(*args, **kwargs), tuple(by_position), by_name


def judge_file(file: Path, first: int, options: argparse.Namespace, found: Connection) -> None:
    """Send the name and then the line of each module of a file, from the one with index `first`.

    This process leads a group of its own, so that `run` can end the compilers that it has started, too.
    """
    os.setsid()

    def late(*_: Any) -> NoReturn:
        raise TimeoutError(f"no end within {options.seconds} s")

    signal.signal(signal.SIGALRM, late)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # modules print
    try:
        modules = list(cases(file))
    except Exception as error:  # noqa: BLE001 whatever the file raises with this version of torch
        found.send(f"no case {file.stem}: {type(error).__name__}: {str(error)[:100]}")
        return
    for name, build in modules[first:]:
        found.send(name)
        random.seed(0)
        signal.alarm(options.seconds)
        try:
            line = judged(name, build, getattr(torch, options.dtype), options.device, options.dynamic)
        except TimeoutError as error:
            line = f"ended {name:48} {error}"
        signal.alarm(0)
        found.send(line)


def run(file: Path, options: argparse.Namespace, until: float) -> list[str]:
    """Return the lines of a file's modules, judged in as many processes as it takes, until the time `until`."""
    lines: list[str] = []
    while time.monotonic() < until:
        found, theirs = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=judge_file, args=(file, len(lines), options, theirs))
        process.start()
        theirs.close()
        name = ""  # of the module that is being judged
        try:
            while found.poll(min(options.seconds + _GRACE_S, max(1.0, until - time.monotonic()))):
                message = found.recv()
                if name or " " in message:
                    lines.append(message)
                    name = ""
                else:
                    name = message
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(process.pid, signal.SIGKILL)
            why = f"no end within {options.seconds + _GRACE_S} s"
        except EOFError:
            process.join()
            why = f"the process ended with {process.exitcode}"
        if not name or time.monotonic() > until:  # the file is done, takes too long to import, or there is no time
            break
        lines.append(f"ended {name:48} {why}")
    return lines


def chosen(folder: Path, options: argparse.Namespace) -> Sequence[Path]:
    """Return the files to run, in an order that depends only on `--seed`."""
    files = sorted(folder.glob(f"{options.only or 'test_'}*.py"))
    random.Random(options.seed).shuffle(files)
    return files[: options.files]


def main() -> None:
    """Judge the modules of the chosen files and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder `generated` of the collection")
    parser.add_argument("--only", default="", help="only files whose names begin with this")
    parser.add_argument("--files", type=int, help="how many files (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the order of the files")
    parser.add_argument("--dtype", choices=ALLOWED, default="float64")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dynamic", action="store_true", default=None, help="all sizes are symbolic")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=90, help="limit for one module (default: %(default)s)")
    parser.add_argument("--total-seconds", type=float, default=86400, help="limit for all files")
    options = parser.parse_args()
    _PROCESSES.set_forkserver_preload(["compared_models"])  # imported once, not for each file
    until = time.monotonic() + options.total_seconds
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for lines in pool.map(functools.partial(run, options=options, until=until), chosen(options.folder, options)):
            counts.update(map(verdict, lines))
            if lines:
                print("\n".join(lines), flush=True)
    print(", ".join(f"{count} {how}" for how, count in counts.items()))


if __name__ == "__main__":
    main()
