"""A program as text: setup of its inputs, body, and results. Prints as a self-contained script."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.programs import prelude

SIZES = ({"A": 6, "B": 5}, {"A": 7, "B": 4})  # of the first call, and of the second call if sizes are dynamic
NAME = re.compile(r"\b[pvx]\d+\b")

_MAIN = '''

def gradients(results, arguments, leaves):
    """Return the gradients of all leaves, through all results and changed arguments; zeros for those without one."""
    wanted = [x for x in leaves if x.requires_grad]
    given = [y for y in (*results, *arguments) if isinstance(y, torch.Tensor) and y.requires_grad and not y.is_leaf]
    if not wanted or not given:
        return []
    ones = [numbers(1000 + at, y.shape, "F64").to(y.dtype) for at, y in enumerate(given)]
    got = torch.autograd.grad(given, wanted, ones, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, got)]


if __name__ == "__main__":
    import sys

    import overlapc  # registers the backend

    backend = sys.argv[1] if len(sys.argv) > 1 else "overlapc"
    options = OPTIONS if backend == "overlapc" else None
    compiled = torch.compile(f, backend=backend, dynamic=DYNAMIC, options=options)
    for sizes in CALLS:
        answers = []
        for function in (f, compiled):
            torch.manual_seed(0)
            arguments, leaves = inputs(**sizes)
            results = function(*arguments)
            seen = [x.detach().clone() for x in (*results, *arguments)]
            answers.append(seen + gradients(results, arguments, leaves))
        for at, (eager, ours) in enumerate(zip(*answers)):
            if not torch.equal(torch.nan_to_num(eager), torch.nan_to_num(ours)):
                worst = (eager.double() - ours.double()).abs().max().item()
                print(f"{at}: {tuple(eager.shape)} {eager.dtype} / {ours.dtype}, largest difference {worst:.4g}")
                if eager.numel() <= 40:
                    print("  eager", eager.flatten().tolist(), "\\n  ours ", ours.flatten().tolist())
'''


@dataclass(frozen=True)
class Program:
    """`setup` defines arguments x0, x1, ... and leaves p0, p1, ...; `body` computes; `results` are returned."""

    setup: tuple[str, ...]
    body: tuple[str, ...]  # statements, some of several lines
    results: tuple[str, ...]
    dynamic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the function's parameters."""
        return tuple(match for line in self.setup for match in re.findall(r"^(x\d+) =", line))

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the tensors whose gradients are compared."""
        return tuple(line.split(" =")[0] for line in self.setup if "= leaf(" in line)

    def code(self) -> str:
        """Return the Python source of the functions `inputs` and `f`."""
        arguments, leaves = ", ".join(self.arguments), ", ".join(self.leaves)
        lines = ["def inputs(A, B):", *self.setup, f"return [{arguments}], [{leaves}]"]
        made = "\n    ".join(lines)
        lines = [f"def f({arguments}):", *self.body, f"return ({''.join(f'{x}, ' for x in self.results)})"]
        body = "\n    ".join("\n    ".join(line.split("\n")) for line in lines)
        return f"{made}\n\n\n{body}\n"

    @property
    def calls(self) -> tuple[Mapping[str, int], ...]:
        """The sizes with which the program is called, in order."""
        return SIZES if self.dynamic else SIZES[:1]

    def script(self, comment: str = "", device: str = "cpu") -> str:
        """Return the program as a script: `python file.py [backend]` compares the backend with eager."""
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        text = inspect.getsource(prelude).replace('DEVICE = "cpu"', f'DEVICE = "{device}"')
        constants = f"DYNAMIC, OPTIONS, CALLS = {self.dynamic}, {dict(self.options)!r}, {self.calls!r}\n\n\n"
        return head + text + "\n\n" + constants + self.code() + _MAIN

    def load(self, device: str = "cpu") -> dict[str, Any]:
        """Return a namespace with `inputs` and `f`."""
        made = namespace(device)
        exec(compile(self.code(), "random_program.py", "exec"), made)
        return made


def namespace(device: str) -> dict[str, Any]:
    """Return a new namespace with the prelude's names."""
    module = types.ModuleType(f"random_program_{next(_COUNT)}")
    sys.modules[module.__name__] = module  # Dynamo of torch 2.11 imports the module that a function's globals name
    made = module.__dict__
    exec(_prelude_code(), made)
    made["DEVICE"] = device
    return made


def _prelude_code() -> Any:
    global _compiled
    if _compiled is None:
        _compiled = compile(inspect.getsource(prelude), "random_program_prelude.py", "exec")
    return _compiled


_compiled: Any = None
_COUNT = itertools.count()
