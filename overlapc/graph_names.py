"""Names of the graphs of a step: `forward_0`, `backward_0`, `inference_1`; inner graphs: `true_graph_0_of_forward_0`.

A forward and its backward have the same number, which is that of their `Capture`.
"""

from __future__ import annotations

FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"  # INFERENCE: a forward without a backward


def graph_name(kind: str, number: int) -> str:
    """Return the name of a graph. kind: `FORWARD`, `BACKWARD` or `INFERENCE`."""
    return f"{kind}_{number}"


def kind_of(name: str) -> str:
    """Return the kind of a graph: `FORWARD`, `BACKWARD` or `INFERENCE`, or another word for an inner graph."""
    return name.partition("_")[0]


def is_forward(name: str) -> bool:
    """Whether the graph is a forward that has a backward."""
    return kind_of(name) == FORWARD


def is_backward(name: str) -> bool:
    """Whether the graph is a backward."""
    return kind_of(name) == BACKWARD


def number_of(name: str) -> int | None:
    """Return the number of a graph; None if the backend did not name it."""
    _, _, digits = name.rpartition("_")
    return int(digits) if digits.isdecimal() else None


def forward_of(name: str) -> str:
    """Return the name of the forward that belongs to the backward `name`; "" for any other graph."""
    number = number_of(name)
    return graph_name(FORWARD, number) if is_backward(name) and number is not None else ""
