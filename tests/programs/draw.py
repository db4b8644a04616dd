"""Generate a random program statement by statement; each statement is run in eager first, so every program runs.

Each statement is tried with all sizes that the program will be called with, and with other rounding (`noise`):
statements whose results eager itself does not determine within a few units in the last place are rejected.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.programs.noise import Noise
from tests.programs.outcome import Outcome
from tests.programs.program import NAME, SIZES, Program, namespace
from tests.programs.statements import STATEMENTS, NotHere
from tests.programs.writes import DefinedWrites

SHAPES = ("(A, B)", "(B, A)", "(A,)", "(B,)", "(2, A, B)", "(A, 1)", "(1, B)", "()", "(A, A)")
STATIC_SHAPES = ("(4, 8)", "(3, 17)", "(2, 3, 5)", "(33,)", "(1, 7)", "(16, 16)", "(2, 2, 4, 3)", "(0, 3)", "(40, 67)")
DTYPES = {
    "F32": 9,
    "F16": 1.5,
    "BF16": 2.5,
    "F64": 0.7,
    "I64": 2,
    "I32": 0.7,
    "U8": 0.3,
    "I8": 0.2,
    "I16": 0.2,
    "BOOL": 0.8,
}
RANDOM = re.compile(r"dropout|rand_like|randn_like|bernoulli")
# Statements that torch does not support in a compiled checkpoint, or whose side effects recomputation would repeat.
NOT_RECOMPUTED = ("change", "breaks", "loop", "random_numbers", "conditional")
LARGEST = 6000  # elements of a tensor
RUNTIME = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AttributeError, AssertionError)


class Author:
    """Holds the statements so far, and the value of every variable for each of the sizes."""

    def __init__(self, seed: int, dynamic: bool | None = None, short: bool = False) -> None:
        self.random = random.Random(seed)
        self.dynamic = self.random.random() < 0.3 if dynamic is None else dynamic
        self.special = self.random.random() < 0.12
        self.length = self.random.randrange(20, 46) if not short else self.random.randrange(2, 7)
        self.setup: list[str] = []
        self.body: list[str] = []
        self.used: set[str] = set()
        self.count = 0
        self.scope: list[list[str]] = [[]]  # visible variables by function, the innermost last
        self.spaces: list[dict[str, Any]] = []
        self.in_block = 0

    # Methods that statements use.

    def choice(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def weighted(self, weights: Mapping[str, float]) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def names(self) -> list[str]:
        return self.scope[-1]

    def value(self, name: str) -> Tensor:
        return self.spaces[0][name]

    def dim(self, name: str) -> int:
        return self.random.randrange(self.value(name).ndim)

    def constant(self) -> float:
        return self.choice((0.5, -0.25, 1.5, 2, 3, -1, 0.1, 1e-3, 7, 0.0))

    def tensor(self, dims: int = 0, accept: Any = lambda x: True) -> str:
        """Return a variable with at least `dims` dimensions; prefers recent ones and those that were not read yet."""
        found = [name for name in self.names() if self.value(name).ndim >= dims and accept(self.value(name))]
        if not found:
            raise NotHere
        late = found[-8:]
        unread = [name for name in late if name not in self.used]
        pool = self.random.choices((unread or late, late, found), (4, 4, 3))[0]
        return self.choice(pool)

    def floating(self, dims: int = 0) -> str:
        return self.tensor(dims, lambda x: x.is_floating_point())

    def integer(self) -> str:
        return self.tensor(0, lambda x: not x.is_floating_point() and x.dtype != torch.bool)

    def boolean(self) -> str:
        return self.tensor(0, lambda x: x.dtype == torch.bool)

    def changeable(self) -> str:
        if self.in_block:
            raise NotHere
        return self.tensor(0, lambda x: not (x.requires_grad and x.is_leaf))

    def fitting(self, like: str, floats: bool = False, ints: bool = False, bools: bool = False) -> str:
        """Return a variable that broadcasts into the shape of `like`, or `like` itself if there is none."""
        shape = self.value(like).shape

        def fits(x: Tensor) -> bool:
            if floats and not x.is_floating_point():
                return False
            if ints and (x.is_floating_point() or x.dtype == torch.bool):
                return False
            if bools and x.dtype != torch.bool:
                return False
            return x.ndim <= len(shape) and all(
                a in (1, b) for a, b in zip(reversed(x.shape), reversed(shape), strict=False)
            )

        found = [name for name in self.names() if name != like and fits(self.value(name))]
        return self.choice(found[-6:] + found) if found else like

    def same_shape(self, like: str, same_dtype: bool = False) -> str:
        wanted = self.value(like)
        found = [
            name
            for name in self.names()
            if self.value(name).shape == wanted.shape
            and (self.value(name).dtype == wanted.dtype or not same_dtype)
            and (self.value(name).is_floating_point() or not wanted.is_floating_point())
        ]
        return self.choice(found or [like])

    def fitting_matrix(self, like: str) -> str:
        wanted = self.value(like)
        found = [
            name
            for name in self.names()
            if self.value(name).ndim == 2
            and self.value(name).dtype == wanted.dtype
            and wanted.ndim
            and self.value(name).shape[0] == wanted.shape[-1]
        ]
        return self.choice(found) if found else f"{like}.mT" if wanted.ndim > 1 else f"{like}[:, None]"

    # Writing.

    def draw_inputs(self) -> None:
        count = self.random.randrange(2, 6)
        for at in range(count):
            shape = self.choice(SHAPES if self.dynamic or self.random.random() < 0.6 else STATIC_SHAPES)
            dtype = self.weighted(DTYPES) if at else "F32"
            kind: Any = self.weighted({"normal": 6, "quarters": 2, "special": 3 if self.special else 0})
            if dtype not in ("F16", "BF16", "F32", "F64"):
                kind = 2 if dtype == "BOOL" else self.choice((3, 7))
            layout = self.weighted({"plain": 6, "transposed": 1.5, "sliced": 1, "offset": 1})
            made = f"numbers({self.random.randrange(1000)}, {shape}, '{dtype}', {kind!r}, '{layout}')"
            if dtype not in ("F16", "BF16", "F32", "F64") or self.random.random() < 0.25:
                self.setup.append(f"x{at} = {made}")
                continue
            self.setup.append(f"p{at} = leaf({made})")
            form = self.weighted({"p{}": 5, "p{} * 1": 4, "(p{} * 1).t()": 0.7 if shape.count(",") == 1 else 0})
            self.setup.append(f"x{at} = {form.format(at)}")
        if self.random.random() < 0.25:  # two arguments that share memory
            base = self.random.randrange(count)
            form = self.choice(("x{0}[1:]", "x{0}.reshape(-1)", "x{0}", "x{0}[..., 0]", "x{0}.detach()", "x{0}[:1]"))
            self.setup.append(f"x{count} = {form.format(base)}")

    def prepare(self) -> bool:
        """Compute the inputs anew; return False if that fails."""
        self.spaces = []
        for call, _ in self.worlds():
            space = namespace("cpu")
            space.update(call)
            self.spaces.append(space)
            if not self.run_in(space, noisy=False, text="\n".join(self.setup)):
                return False
        return True

    def worlds(self) -> list[tuple[Mapping[str, int], bool]]:
        return [(SIZES[0], False), (SIZES[0], True), *([(SIZES[1], False)] if self.dynamic else [])]

    def run_in(self, space: dict[str, Any], noisy: bool, text: str) -> bool:
        torch.manual_seed(len(self.body))
        try:
            with Noise(1) if noisy else DefinedWrites():
                exec(text, space)
            for name in self.names():  # raises for views that autograd forbids to read after their base has changed
                _ = name in space and (space[name].requires_grad, space[name].is_leaf)
        except RUNTIME:
            return False
        return True

    def run(self, text: str) -> bool:
        return all(
            self.run_in(space, noisy, text) for space, (_, noisy) in zip(self.spaces, self.worlds(), strict=True)
        )

    def acceptable(self, text: str, made: Sequence[str]) -> bool:
        """Whether the values are of moderate size and eager determines them precisely enough."""
        touched = [*made, *NAME.findall(text)]
        for name in dict.fromkeys(touched):
            values = [space.get(name) for space in self.spaces]
            if not all(isinstance(x, Tensor) for x in values):
                return False
            x, noisy = values[0].detach(), values[1].detach()
            if name in made and (x.numel() > LARGEST or x.ndim > 5 or x.is_complex() or x.is_sparse):
                return False
            if x.shape != noisy.shape or x.dtype != noisy.dtype:
                return False
            if x.is_floating_point():
                finite = x.isfinite()
                if not torch.equal(finite, noisy.isfinite()):
                    return False
                if finite.double().mean() < (0.5 if self.special else 1):
                    return False
                x, noisy = x[finite].double(), noisy[finite].double()
                limit = 300 if values[0].dtype == torch.float16 else 3000
                if x.numel() and x.abs().max() > limit and not self.special:
                    return False
                unit = torch.finfo(values[0].dtype).eps
                if x.numel() and ((x - noisy).abs() > 1000 * unit * (x.abs() + 0.1)).any() and unit < 1e-4:
                    return False
                if x.numel() and ((x - noisy).abs() > 16 * unit * (x.abs() + 0.3)).any() and unit > 1e-4:
                    return False
            elif not torch.equal(x, noisy):
                return False
        return True

    def replay(self) -> None:
        assert self.prepare()
        assert all(self.run(text) for text in self.body)

    def write(self) -> bool:
        """Try to append a statement; return False if it was rejected."""
        kinds = {name: weight for name, (weight, _) in STATEMENTS.items()}
        name = self.weighted(kinds)
        if self.in_block and name in NOT_RECOMPUTED:
            return False
        before = self.count
        try:
            text = STATEMENTS[name][1](self)
        except (NotHere, RuntimeError):  # autograd forbids even reading attributes of some views
            return False
        made = [x for x in dict.fromkeys(re.findall(r"^\s*(v\d+) =", text, re.MULTILINE)) if int(x[1:]) > before]
        if name == "checkpointed":
            made = made[-1:]
        good = self.run(text) and self.acceptable(text if name != "checkpointed" else "", made)
        if not good:
            if not self.in_block:
                self.replay()  # undo its in-place changes
            return False
        self.body.append(text)
        self.used.update(NAME.findall(text.split("=", 1)[-1]))
        self.scope[-1].extend(x for x in made if x not in self.scope[-1])
        return True

    def block(self, length: int) -> str:
        """Return the definition of a function of a few statements and its checkpointed call."""
        if self.in_block > 1:
            raise NotHere
        parameters = list(dict.fromkeys(self.floating() for _ in range(2)))
        outer_body, outer_used = self.body, set(self.used)
        inner: list[str] = []
        renamed = {name: self.new() for name in parameters}
        added = []
        for name, inside in renamed.items():
            for space in self.spaces:
                space[inside] = space[name].detach().clone().requires_grad_()
            added.append(inside)
        self.scope.append(added[:])
        self.in_block += 1
        self.body = inner
        tries = 0
        while len(inner) < length and tries < 30:
            self.write()
            tries += 1
        last = next((x for x in reversed(self.scope[-1]) if self.value(x).is_floating_point()), None)
        self.body, self.used = outer_body, outer_used
        self.scope.pop()
        self.in_block -= 1
        if not inner or last is None or last in added:
            raise NotHere
        function = f"f{self.count}"
        lines = [f"def {function}({', '.join(added)}):", *"\n".join(inner).split("\n"), f"return {last}"]
        call = f"{self.new()} = checkpoint({function}, {', '.join(parameters)}, use_reentrant=False)"
        return "\n    ".join(lines) + "\n" + call

    def results(self) -> tuple[str, ...]:
        made = [name for name in self.names() if name[0] == "v"]
        unread = [name for name in made if name not in self.used]
        chosen = unread[-6:] + self.random.sample(made, min(len(made), 3))
        if self.random.random() < 0.3:
            chosen.append(self.choice([name for name in self.names() if name[0] == "x"]))
        if self.random.random() < 0.1 and chosen:
            chosen.append(chosen[0])
        elif self.random.random() < 0.9:
            chosen = list(dict.fromkeys(chosen))
        return tuple(chosen)

    def options(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if RANDOM.search("\n".join(self.body)):
            made["fallback_random"] = True
        draw = self.random.random()
        if draw < 0.15:
            made["memory"] = "pool"
        elif draw < 0.25:
            made["matmul"] = "native"
        elif draw < 0.3:
            made["check_lifecycle"] = True
        if self.random.random() < 0.2 and "memory" not in made:
            made["wrapper"] = "fx"
        return made


def backward_runs(program: Program, device: str) -> bool:
    """Whether the program runs forward and backward for all sizes (autograd rejects some in-place changes)."""
    for call in program.calls:
        try:
            Outcome.of(program.load(device), call)
        except RUNTIME:
            return False
    return True


def draw(seed: int, device: str = "cpu", dynamic: bool | None = None, short: bool = False) -> Program:
    """Return the program of this seed.

    The program is generated on the CPU, where an index out of bounds raises an exception, whatever `device` is. It has
    20 to 45 statements, or 2 to 6 if `short` (which gives a different program for the same seed).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        author = Author(seed, dynamic, short)
        author.draw_inputs()
        while not author.prepare():
            author.setup = []
            author.draw_inputs()
        author.scope[0].extend(re.findall(r"^(x\d+) =", "\n".join(author.setup), re.MULTILINE))
        tries = 0
        while len(author.body) < author.length and tries < 6 * author.length:
            author.write()
            tries += 1
        program = Program(tuple(author.setup), tuple(author.body), author.results(), author.dynamic, author.options())
        while not backward_runs(program, "cpu"):
            program = less_changed(program)
        if device != "cpu" and not backward_runs(program, device):
            return draw(seed + 2**32, device, dynamic, short)  # an op that this device has no kernel for
        return program


def less_changed(program: Program) -> Program:
    """Return the program without its last in-place statement, or, if there is none, without gradients; what is empty is
    always filled."""
    for at in reversed(range(len(program.body))):
        text = program.body[at]
        if re.search(r"\w_\(|\] [-+*]?= ", text) and not re.search(r"^\s*v\d+ =", text, re.MULTILINE):
            return replace(program, body=program.body[:at] + program.body[at + 1 :])
    for at in reversed(range(len(program.body))):
        made = re.match(r"(v\d+) = ", program.body[at])
        if made and re.search(r"\.[a-z_]+_\(", program.body[at]) and "empty" not in program.body[at]:
            body = list(program.body)
            target = re.split(r"\.[a-z_]+_\(", body[at].split("= ", 1)[1])[0]
            body[at] = f"{made[1]} = {target}"
            return replace(program, body=tuple(body))
    return replace(program, setup=tuple(re.sub(r"leaf\((.*)\)$", r"\1", line) for line in program.setup))
