"""Rewrites attention whose mask depends only on positions to a call without a mask.

A model that is traced whole builds its mask as a tensor; a kernel with a mask reads it, and also computes the scores
that it masks. The rewrite applies to the graph that Dynamo captured, before autograd:

    scaled_dot_product_attention(q, k, v, attn_mask=arange(n) <= arange(n)[:, None])
 -> scaled_dot_product_attention(q, k, v, is_causal=True)

A mask that is true everywhere is dropped, too, and so are the copies of keys and values for grouped-query attention if
the kernel without a mask can read each key for several heads. Attention within a window is computed in pieces of the
sequence (windows.py); offsets and masks that depend on data stay. The verdict on the mask is passed to the ATen graph
as `node.meta["custom"]["overlapc_attention"]`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.fx.captured.in_place import Writes, name_of
from overlapc.fx.masks.conditions import Box, Condition, NotNegative
from overlapc.fx.masks.position_values import Cases, Grid, UnknownValue, condition_of
from overlapc.fx.masks.positions import Positions
from overlapc.fx.masks.windows import Window, window_of, windowed_attention
from overlapc.fx.node_writer import described_like
from overlapc.fx.versions.tensors import size_hint

KEY = "overlapc_attention"  # under node.meta["custom"]
CAUSAL, FULL, WINDOW = "its mask is causal", "its mask is true everywhere", "its mask is a window"
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_MASKED = -1e30  # adding this number or less to a score masks it: no score in bfloat16 or float32 is that large
_LARGEST_FLASH_HEAD = 256  # elements
_INNER = ("tag_activation_checkpoint", "wrap")  # higher-order ops that call a graph on the operands that follow it
_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_fused_attention_overrideable": "fused",
}


def drop_masks(gm: GraphModule, *, eager_dropout: bool) -> None:
    """Rewrite every attention of Dynamo's graph whose mask is causal, true everywhere or a window, in place.

    eager_dropout: dropout must draw the same random numbers as eager, which another kernel may not do.
    """
    _Rewriter(eager_dropout).graph(gm, {})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The proven properties of an attention's mask."""

    why: str  # its text in the report
    outcome: str  # its kind: CAUSAL, FULL, WINDOW, or another word
    window: Window | None = None  # the mask as a window, whether or not attention is computed in pieces


class _Rewriter:
    def __init__(self, eager_dropout: bool) -> None:
        self._eager_dropout = eager_dropout
        self._count = 0
        self._verdicts: dict[tuple[Grid, tuple[sympy.Expr, ...]], Verdict] = {}  # layers share a mask

    def graph(self, gm: GraphModule, given: Mapping[int, Grid]) -> set[int]:
        """Rewrite the attentions of one graph. given: the known grids of inputs, by position.

        Return the positions of those inputs whose grids still hold at the end.
        """
        positions, writes = Positions(), Writes()
        changed = False
        inputs = gm.graph.find_nodes(op="placeholder")
        for place, grid in given.items():
            positions.learn(inputs[place], grid)
        chosen = any("sdp" in name_of(node) for node in gm.graph.nodes)  # sdpa_kernel selects kernels in the graph
        for node in gm.graph.nodes:
            writes.visit(node)
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                changed |= self._attention(node, positions, None if chosen else writes)
            elif node.op == "call_function" and getattr(node.target, "__name__", "") in _INNER:
                self._inner(gm, node, positions)
            else:
                positions.visit(node)
        if changed:
            gm.recompile()
        return {place for place, grid in given.items() if positions.grid(inputs[place]) is grid}

    def _inner(self, gm: GraphModule, node: fx.Node, positions: Positions) -> None:
        """Rewrite the graph that `node` calls, such as a checkpointed part of the model."""
        body, *operands = node.args
        inner = getattr(gm, str(body.target), None) if isinstance(body, fx.Node) and body.op == "get_attr" else None
        calls = [
            user
            for each in gm.graph.find_nodes(op="get_attr")
            for user in each.users
            if isinstance(body, fx.Node) and each.target == body.target
        ]
        if not isinstance(inner, GraphModule) or calls != [node]:  # a graph with several calls is rewritten for none
            positions.visit(node)
            return
        found = {place: positions.grid(each) for place, each in enumerate(operands)}
        known = {place: grid for place, grid in found.items() if grid is not None}
        for place in known.keys() - self.graph(inner, known):
            positions.forget(operands[place])  # type: ignore[arg-type]

    def _attention(self, node: fx.Node, positions: Positions, writes: Writes | None) -> bool:
        """Rewrite one attention if possible, note the reason in its metadata, and return whether it was rewritten.

        writes: those before `node`. None: keys and values must keep their repeats for grouped-query attention.
        """
        arguments = dict(zip(_PARAMETERS, node.args, strict=False)) | node.kwargs
        mask = arguments.get("attn_mask")
        verdict = self._verdict(arguments, positions)
        dropout = arguments.get("dropout_p", 0.0) != 0.0
        if verdict.outcome in (CAUSAL, FULL) and self._eager_dropout and dropout:
            verdict = Verdict("masked: its dropout must draw eager's random numbers", "dropout")
        piece = None if dropout else _piece(verdict, arguments)
        if piece is not None:
            verdict = replace(verdict, why=f"{WINDOW}, in pieces of {piece}", outcome=WINDOW)
        rewrite = mask is not None and verdict.outcome in (CAUSAL, FULL)
        if rewrite:
            arguments |= {"attn_mask": None, "is_causal": verdict.outcome == CAUSAL}
        if writes is not None and arguments.get("attn_mask") is None:
            rewrite |= _share_keys(arguments, writes)
        self._count += 1
        custom = dict(node.meta.get("custom") or {})
        node.meta["custom"] = {**custom, KEY: {"at": self._count, "why": verdict.why, "outcome": verdict.outcome}}
        if piece is not None and verdict.window is not None:
            node.target = windowed_attention
            node.args = (*(arguments[name] for name in ("query", "key", "value")), *astuple(verdict.window))
            node.kwargs = {"piece": piece, "scale": arguments.get("scale")}
        elif rewrite:
            node.args = tuple(arguments.pop(name) for name in ("query", "key", "value"))
            node.kwargs = arguments
        if rewrite or piece is not None:
            _keep_dim_order(node)
        return rewrite or piece is not None

    def _verdict(self, arguments: Mapping[str, Any], positions: Positions) -> Verdict:
        mask = arguments.get("attn_mask")
        if mask is None:
            text = "causal" if arguments.get("is_causal") is True else "no mask"
            return Verdict(text, text)
        grid = positions.grid(mask)
        if grid is None:
            return Verdict("masked: its mask depends on data, or on positions in an unsupported way", "data")
        query, keys = (_fake(arguments[name]) for name in ("query", "key"))
        if query is None or keys is None:
            return Verdict("masked: its queries or keys are not plain tensors", "data")
        rows, columns = positions.extent(query.shape[-2]), positions.extent(keys.shape[-2])
        scores = (*map(positions.extent, query.shape[:-2]), rows, columns)
        key = grid, scores
        if key not in self._verdicts:
            self._verdicts[key] = _classify(grid, scores, positions.shape_env)
        return self._verdicts[key]


# --- classification of masks


def _classify(grid: Grid, scores: tuple[sympy.Expr, ...], shape_env: ShapeEnv | None) -> Verdict:
    """Return the verdict on a mask that depends only on positions, for scores of these sizes."""
    rows, columns = scores[-2:]
    padded = (*[sympy.S.One] * (len(scores) - len(grid.size)), *grid.size)
    if len(padded) > len(scores) or any(n not in (1, extent) for n, extent in zip(padded, scores, strict=True)):
        return Verdict("masked: the sizes of its mask do not match its scores", "shape")
    index = tuple(sympy.Symbol(f"i{at}", integer=True, nonnegative=True) for at in range(len(scores)))
    box = Box(dict(zip(index, scores, strict=True)), shape_env)
    try:
        allowed = _allowed(grid.read(index, box), box)
    except UnknownValue:
        return Verdict("masked: its mask depends on positions in an unsupported way", "positions")
    if allowed is True:
        return Verdict(FULL, FULL)
    if allowed == NotNegative(sympy.expand(index[-2] - index[-1])) and rows == columns:
        return Verdict(CAUSAL, CAUSAL)
    window = window_of(allowed, index[-2], index[-1]) if rows == columns else None
    shown = str(allowed).replace(str(index[-2]), "query").replace(str(index[-1]), "key")
    return Verdict(f"masked: its mask is neither causal nor all true ({shown})", "positions", window)


def _piece(verdict: Verdict, arguments: Mapping[str, Any]) -> int | None:
    """Return the length of a piece for attention within a window; None if it is not computed in pieces."""
    fakes = [_fake(arguments[name]) for name in ("query", "key", "value")]
    if verdict.window is None or arguments.get("is_causal") or arguments.get("enable_gqa"):
        return None
    if any(fake is None or fake.ndim != 4 or not isinstance(fake.shape[-2], int) for fake in fakes):
        return None
    (batch, heads, length, _), *others = (fake.shape for fake in fakes if fake is not None)
    same = all(tuple(other[:3]) == (batch, heads, length) for other in others)
    return verdict.window.piece(length) if same else None


def _allowed(value: Any, box: Box) -> Condition:
    """Return the condition under which a mask keeps a score: it is true, or adds 0.

    UnknownValue if it adds a number other than 0 that is larger than `_MASKED`, or is an integer.
    """
    if not isinstance(value, Cases):
        if isinstance(value, sympy.Expr):
            raise UnknownValue
        return value
    if any(number != 0 and number > _MASKED for number in value.of):
        raise UnknownValue
    masked = condition_of(value, box)
    return box.any_of([value.of.get(0.0, False)]) if masked is not False else True


def _fake(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value) else None


# --- the layout of results


def _keep_dim_order(node: fx.Node) -> None:
    """Give the result of a rewritten attention the dim order that it has in eager mode.

    Torch chooses a kernel by the mask, too, and kernels return `[batch, heads, length, width]` in two orders.
    """
    eager = node.meta["example_value"]
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["example_value"])
    with eager.fake_mode:
        found: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    order = _dim_order(eager)
    if _dim_order(found) == order:
        return
    with node.graph.inserting_after(node):
        ordered = node.graph.call_function(in_dim_order, (node, order))
    custom = {key: value for key, value in node.meta["custom"].items() if key != KEY}
    ordered.meta = {**described_like(node), "custom": custom, "example_value": eager}
    node.meta["example_value"] = found
    node.replace_all_uses_with(ordered, delete_user_cb=lambda user: user is not ordered)


def _dim_order(tensor: Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -size_hint(strides[dim])))


def in_dim_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `tensor` without gaps in memory, `order[0]` being the dim whose elements are farthest apart."""
    places = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(places)


# --- keys that several heads share


def _share_keys(arguments: dict[str, Any], writes: Writes) -> bool:
    """Replace keys and values that are repeated for several heads by the unrepeated ones; return whether it did so."""
    if arguments.get("enable_gqa") or not _flash_shares_keys(arguments):
        return False
    key, value = (_before_repeat(arguments[name], writes) for name in ("key", "value"))
    if key is None or value is None or _fake(key).shape[1] != _fake(value).shape[1]:  # type: ignore[union-attr]
        return False
    arguments |= {"key": key, "value": value, "enable_gqa": True}
    return True


def _flash_shares_keys(arguments: Mapping[str, Any]) -> bool:
    """Whether torch will choose flash attention, the only kernel that can read one key for several heads."""
    fakes = [_fake(arguments[name]) for name in ("query", "key", "value")]
    query, key, value = fakes
    if query is None or key is None or value is None or query.ndim != 4:
        return False
    width = query.shape[-1]
    if not all(isinstance(n, int) and n == width for n in (width, key.shape[-1], value.shape[-1])):
        return False
    if not torch.backends.cuda.flash_sdp_enabled():  # the switch is for every device
        return False
    if query.device.type == "cpu":
        return arguments.get("dropout_p", 0.0) == 0.0
    old = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8
    half = query.dtype in (torch.float16, torch.bfloat16) and {key.dtype, value.dtype} == {query.dtype}
    return query.device.type == "cuda" and half and not old and width % 8 == 0 and width <= _LARGEST_FLASH_HEAD


def _before_repeat(node: Any, writes: Writes) -> fx.Node | None:
    """Return what `node` repeats for several heads, if reading it instead changes no value and no gradient."""
    source = _unrepeated(node)
    if source is None or not (writes.unchanged(source, since=node) and writes.unchanged(node, since=node)):
        return None
    fakes = (_fake(source), _fake(node))
    without_gradient = [fake is None or not fake.requires_grad for fake in fakes]  # `no_grad` ends the gradient
    return source if without_gradient[0] == without_gradient[1] else None


def _unrepeated(node: Any) -> fx.Node | None:
    """Return x of [batch, heads, ...] if `node` repeats each head of x several times in a row; else None."""
    if not isinstance(node, fx.Node):
        return None
    name = name_of(node)
    if name == "repeat_interleave":
        given = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | node.kwargs
        in_order = isinstance(given.get("repeats"), int) and given.get("dim") in (1, -3)
        return _heads(given.get("input", given.get("self")), node) if in_order else None
    if name not in ("reshape", "view", "flatten"):
        return None
    expanded = node.args[0]
    if not isinstance(expanded, fx.Node) or name_of(expanded) != "expand":
        return None
    inserted = expanded.args[0]
    if not isinstance(inserted, fx.Node) or name_of(inserted) not in ("getitem", "unsqueeze"):
        return None
    if name_of(inserted) == "getitem":
        picked = inserted.args[1]
        picked = picked if isinstance(picked, tuple) else (picked,)
        if not all(each is None or each is Ellipsis or each == slice(None) for each in picked):
            return None
    source = _heads(inserted.args[0], node)
    shapes = [_fake(each) for each in (source, inserted, expanded)]
    if any(each is None for each in shapes):
        return None
    (batch, heads, *rest), before, after = (tuple(each.shape) for each in shapes)  # type: ignore[union-attr]
    times = after[2] if len(after) == 5 else None
    same = before == (batch, heads, 1, *rest) and after == (batch, heads, times, *rest)
    return source if same else None


def _heads(source: Any, repeated: fx.Node) -> fx.Node | None:
    """Return `source` if `repeated` has its sizes, except for a multiple of its size in dim 1; else None."""
    one, many = _fake(source), _fake(repeated)
    if one is None or many is None or one.ndim != 4 or many.ndim != 4:
        return None
    heads, total = one.shape[1], many.shape[1]
    plain = isinstance(heads, int) and isinstance(total, int) and heads > 0 and total % heads == 0
    others = (one.shape[0], *one.shape[2:]) == (many.shape[0], *many.shape[2:])
    return source if plain and others else None


# --- data for the report


def attention_kernels(graph: fx.Graph) -> Counter[str]:
    """Return a line for each kind of attention in an ATen graph (kernel, sizes, verdict on the mask), and its count."""
    found: Counter[str] = Counter()
    composed: dict[int, tuple[str, str]] = {}
    fused: set[int] = set()
    for node in graph.nodes:
        note = _note(node)
        backward = _operation(node).endswith("_backward")
        kernel = _KERNELS.get(_operation(node).removesuffix("_backward"))
        if kernel is not None:
            if note is None:  # torch 2.13 leaves metadata out of a checkpointed call itself, but not of its results
                note = next(filter(None, map(_note, node.users)), None)
            at = 1 if backward else 0
            query = node.args[at].meta["val"]
            shape = ", ".join(map(str, query.shape))
            dtype = str(query.dtype).removeprefix("torch.")
            what = f"{kernel} attention{' backward' if backward else ''}"
            found[f"{what} of [{shape}] {dtype}: {note['why'] if note else 'called by the model directly'}"] += 1
            fused |= {note["at"]} if note else set()
        elif note is not None:
            composed.setdefault(note["at"], (note["why"], note["outcome"]))
    for at, (why, _) in composed.items():
        if at not in fused:
            found[f"attention as separate products and softmax: {why}"] += 1
    return found


def attention_counts(graph: fx.Graph) -> dict[str, int]:
    """Count the masks of attention in a forward graph: dropped as causal or full, turned into a window, or kept."""
    outcomes = {note["at"]: note["outcome"] for note in _notes(graph)}
    names = {
        CAUSAL: "attention_masks_causal", FULL: "attention_masks_full", WINDOW: "attention_masks_windows",
    }  # fmt: skip
    kept = ("causal", "no mask")
    return dict(Counter(names.get(each, "attention_masks_kept") for each in outcomes.values() if each not in kept))


def _notes(graph: fx.Graph) -> Iterator[Mapping[str, Any]]:
    for node in graph.nodes:
        note = _note(node)
        if note is not None:
            yield note


def _note(node: fx.Node) -> Mapping[str, Any] | None:
    custom = node.meta.get("custom")
    return custom.get(KEY) if isinstance(custom, Mapping) else None


def _operation(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
