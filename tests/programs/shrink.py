"""Shrink a failing program by delta debugging over lines, names and inputs."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.programs.judge import Verdict, judge
from tests.programs.outcome import Outcome
from tests.programs.program import NAME, Program

DTYPE_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def shrink(
    program: Program,
    verdict: Verdict,
    device: str = "cpu",
    seconds: float = 120,
    judged: Callable[[Program, str], Verdict] = judge,
) -> Program:
    """Return the smallest program found within `seconds` whose verdict is the same (`Verdict.what`)."""
    ends = time.monotonic() + seconds
    tried: set[str] = set()

    def fails(candidate: Program) -> bool:
        text = repr(candidate)
        if text in tried or time.monotonic() > ends or not runs(candidate, device):
            return False
        tried.add(text)
        return judged(candidate, device).what == verdict.what

    progress = True
    while progress and time.monotonic() < ends:
        progress = False
        for steps in (fewer_results, needed, halves, plainer, without_lines, fresh_inputs, fewer_inputs):
            found = True
            while found and time.monotonic() < ends:
                found = next((candidate for candidate in steps(program, device) if fails(candidate)), None)
                if found is not None:
                    program, progress = found, True
    return program


def runs(program: Program, device: str) -> bool:
    """Whether the program runs in eager, forward and backward."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call in program.calls:
                Outcome.of(program.load(device), call)
    except Exception:  # noqa: BLE001 (a candidate cut at random may fail in any way)
        return False
    return True


def lines_of(program: Program) -> list[str]:
    return "\n".join(program.body).split("\n")


def renamed(lines: list[str], program: Program, name: str, other: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the lines and results with `name` replaced by `other`."""

    def swap(match: re.Match[str]) -> str:
        return other if match[0] == name else match[0]

    results = tuple(dict.fromkeys(other if x == name else x for x in program.results))
    return [NAME.sub(swap, line) for line in lines], results


def fewer_results(program: Program, device: str) -> Iterator[Program]:
    if len(program.results) > 1:
        for name in program.results:
            yield replace(program, results=(name,))
        for name in program.results:
            yield replace(program, results=tuple(x for x in program.results if x != name))


def needed(program: Program, device: str) -> Iterator[Program]:
    """Yield the program without statements on which no result depends.

    Statements that may change, in place, a tensor on which a result depends are kept.
    """
    wanted = set(program.results)
    kept: list[str] = []
    for text in reversed(program.body):
        names = NAME.findall(text)
        made = set(re.findall(r"^\s*(v\d+) =", text, re.MULTILINE))
        changes = not made or re.search(r"\w_\(", text)
        if made & wanted or (changes and wanted & set(names)) or not names:
            kept.append(text)
            wanted.update(names)
    if len(kept) < len(program.body):
        yield replace(program, body=tuple(reversed(kept)) or ("pass",))


def halves(program: Program, device: str) -> Iterator[Program]:
    """Yield the program without ranges of statements, the largest ranges first."""
    size = len(program.body) // 2
    while size > 1:
        for start in range(0, len(program.body), size):
            yield replace(program, body=program.body[:start] + program.body[start + size :])
        size //= 2


def without_lines(program: Program, device: str) -> Iterator[Program]:
    """Yield the program without one line, and with the line's variable replaced by a variable that the line read."""
    lines = lines_of(program)
    for at in reversed(range(len(lines))):
        rest = lines[:at] + lines[at + 1 :]
        yield replace(program, body=tuple(rest) or ("pass",))
        made = re.match(r"\s*(v\d+) = (.*)", lines[at])
        if made:
            for other in dict.fromkeys(NAME.findall(made[2])):
                if other != made[1]:
                    changed, results = renamed(rest, program, made[1], other)
                    yield replace(program, body=tuple(changed) or ("pass",), results=results)


def plainer(program: Program, device: str) -> Iterator[Program]:
    if program.dynamic:
        yield replace(program, dynamic=False)
    if program.options:
        yield replace(program, options={})
    for at, line in enumerate(program.setup):
        for old, new in (
            ("'normal'", "'quarters'"),
            (r"'(transposed|sliced|offset)'", "'plain'"),
            (r"leaf\((.*)\)$", r"\1"),
            (r"(p\d+) \* 1$", r"\1"),
            (r"'(B?F16|F64)'", "'F32'"),
        ):
            changed = re.sub(old, new, line)
            if changed != line:
                yield replace(program, setup=(*program.setup[:at], changed, *program.setup[at + 1 :]))


def fresh_inputs(program: Program, device: str) -> Iterator[Program]:
    """Yield the program with a variable replaced by a new input, so that statements that compute it can be removed."""
    lines = lines_of(program)
    tail = [f"MADE.update({{{', '.join(f'{x!r}: {x}' for x in names_made(lines))}}})"]
    space = replace(program, body=(*lines, *tail)).load(device)
    space["MADE"] = {}
    try:
        arguments, _ = space["inputs"](**program.calls[0])
        space["f"](*arguments)
    except Exception:  # noqa: BLE001 (as above)
        return
    values: dict[str, Any] = space["MADE"]
    count = 1 + max(int(name[1:]) for name in NAME.findall(" ".join((*program.setup, *program.body))))
    for name, value in reversed(values.items()):
        if not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES:
            continue
        at = next(at for at, line in enumerate(lines) if line.startswith(f"{name} = "))
        if not NAME.search(lines[at].split("=", 1)[1]):
            continue
        rest, results = renamed(lines[:at] + lines[at + 1 :], program, name, f"x{count}")
        kind = "'normal'" if value.is_floating_point() else "3"
        made = f"numbers({count}, {tuple(value.shape)}, '{DTYPE_NAMES[value.dtype]}', {kind})"
        setup = (
            (f"p{count} = leaf({made})", f"x{count} = p{count} * 1") if value.requires_grad else (f"x{count} = {made}",)
        )
        yield replace(program, setup=(*program.setup, *setup), body=tuple(rest) or ("pass",), results=results)


def names_made(lines: list[str]) -> list[str]:
    return list(dict.fromkeys(match[1] for line in lines if (match := re.match(r"(v\d+) = ", line))))


def fewer_inputs(program: Program, device: str) -> Iterator[Program]:
    text = " ".join((*program.body, *program.results))
    for at, line in enumerate(program.setup):
        name = line.split(" =")[0]
        later = " ".join((text, *program.setup[at + 1 :]))
        if not re.search(rf"\b{name}\b", later):
            yield replace(program, setup=program.setup[:at] + program.setup[at + 1 :])
