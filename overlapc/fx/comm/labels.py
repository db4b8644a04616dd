"""Labels on nodes: the sharded parameter that a node gathers or whose gradient it reduces.

`overlapc.fully_shard` puts a label on every node that gathers a parameter or reduces its gradient. The label is
`node.meta["custom"]["overlapc"]` (`torch.fx.traceback.annotate`), because this is the only metadata that Dynamo,
AOTAutograd's joint tracing, CSE and the partitioner all preserve. AOTAutograd overwrites a backward node's entry with
that of its forward node, so forward and backward share one label, and a node's op tells the two apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import traceback

KEY = "overlapc"  # under node.meta["custom"]


@dataclass(frozen=True, slots=True)
class ParamLabel:
    """The sharded parameter that a node belongs to, as plain values; equal on all ranks except for `post_*`."""

    group: str  # path of the module passed to fully_shard, from the outermost module; "" for the outermost one
    param: str  # the parameter's name in the outermost module's state_dict
    axis: str  # mesh axis that parameters are sharded over (gather and reduce-scatter)
    replicate_axis: str = ""  # HSDP: mesh axis that the scattered gradient is all-reduced over
    reshard: bool = True  # gather again in backward instead of keeping the gathered parameter
    post_size: int = 0  # reshard_after_forward=int: ranks that keep the parameter between forward and backward
    post_group: str = ""  # their process group's name, which differs between ranks
    post_rank: int = 0  # this rank in that group
    # Counts the sharded parameters of this process, which all ranks make in one order: two modules that were sharded by
    # themselves may have parameters of one name. -1: the label was inferred from the graph, which may differ between
    # ranks, so others need not have it.
    number: int = -1

    def as_annotation(self) -> dict[str, dict[str, Any]]:
        """Return the label for `torch.fx.traceback.annotate`; plain values only, because torch may log it as JSON."""
        return {KEY: dataclasses.asdict(self)}


def annotate(label: ParamLabel) -> AbstractContextManager[Any]:
    """Label every node traced inside the context; costs nothing while nothing is traced."""
    if traceback.has_preserved_node_meta():
        return traceback.annotate(label.as_annotation())
    return nullcontext()


def annotation_text(node: fx.Node, of_number: Mapping[int, int]) -> str:
    """Return the annotations of `node` as text that is equal in other processes.

    of_number: the position of each number in the graph (`numbered`), because processes may have made other parameters.
    """
    custom = node.meta.get("custom", "")
    if not isinstance(custom, Mapping) or KEY not in custom:
        return str(custom)
    return str({**custom, KEY: {**custom[KEY], "number": of_number[custom[KEY]["number"]]}})


def numbered(numbers: Iterable[int]) -> dict[int, int]:
    """Map the number of each sharded parameter to its position among these."""
    return {number: at for at, number in enumerate(sorted(set(numbers)))}


def numbers_in(graph: fx.Graph) -> dict[int, int]:
    """Map the number of each label in the graph to its position among them."""
    labels = map(label_of, graph.nodes)
    return numbered(label.number for label in labels if label is not None)


def put_label(node: fx.Node, label: ParamLabel) -> None:
    """Label one node of an already traced graph."""
    custom = node.meta.get("custom")
    node.meta["custom"] = {**(custom if isinstance(custom, Mapping) else {}), **label.as_annotation()}


def label_of(node: fx.Node) -> ParamLabel | None:
    """Return the label of `node`, or None."""
    custom = node.meta.get("custom")
    if not isinstance(custom, Mapping) or KEY not in custom:
        return None
    return ParamLabel(**custom[KEY])
