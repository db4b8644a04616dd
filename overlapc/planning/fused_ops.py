"""From an FX graph to fused ops: equal layers are lowered and fused once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch.fx import GraphModule, Node

from overlapc.autotune.fusions import KernelTimes
from overlapc.autotune.product_choice import ProductTimes, choice
from overlapc.codegen import generators
from overlapc.config import Config
from overlapc.estimators.agreement.rank_agreement import GraphAgreement
from overlapc.fusion import FusionReport, combine, fuse_before_combining, fuse_ops
from overlapc.fx.precision import is_coarse, note_coarse_once
from overlapc.fx.repeats import KEPT, Repeats, find_repeats, place_results
from overlapc.ir.body import Body
from overlapc.ir.ops import LoweredGraph, tree_leaves
from overlapc.lowering import Communication, lower
from overlapc.lowering.product import Product
from overlapc.planning.dumps import Dumps
from overlapc.planning.repeated_layers import Repeated, stand_ins
from overlapc.runtime.counters import count
from overlapc.runtime.phases import phase


def fused(
    gm: GraphModule,
    name: str,
    config: Config,
    communication: Mapping[Node, Communication],
    agreement: GraphAgreement | None,
    freeable: Collection[str],
    dumps: Dumps,
) -> tuple[LoweredGraph, FusionReport]:
    """Lower and fuse a graph; return it in loop IR with its fused ops, and the report of fusion.

    freeable: inputs whose memory is freed after their last reader.
    """
    with phase("lowering"):
        note_coarse_once(gm.graph)
        once = config.fusion and config.trace_once and config.matmul != "autotune"  # whose times ranks agree on
        repeats = _repeats(gm, communication) if once else None
    while repeats is not None:
        found = _once_for_all_layers(gm, name, config, communication, agreement, freeable, repeats, dumps)
        if found is not None:
            count("layers_fused_as_another", len(repeats.stretches) - KEPT)
            return found
        repeats = repeats.in_pairs()  # a sum of residuals may be inlined in every other layer
    with phase("lowering"):
        lowered = _lowered(gm, name, config, communication, agreement, {})
    _share_hints(lowered, agreement)
    dumps.write("ir", "lowered", lambda: str(lowered))
    measure = _kernel_times(lowered, config, alone=agreement is None)
    with phase("fusion"):
        ops, report = fuse_ops(lowered, config.fusion, freeable, measure=measure, refuse=_refuse_fused)
    return replace(lowered, ops=ops), report


def _repeats(gm: GraphModule, communication: Mapping[Node, Communication]) -> Repeats | None:
    def same(node: Node) -> Hashable:
        found = communication.get(node)
        if found is None:
            return is_coarse(node)
        return replace(found.comm, unit=""), found.asynchronous  # only the unit differs between layers

    place_results(gm.graph)
    return find_repeats(gm.graph, same)


def _once_for_all_layers(
    gm: GraphModule,
    name: str,
    config: Config,
    communication: Mapping[Node, Communication],
    agreement: GraphAgreement | None,
    freeable: Collection[str],
    repeats: Repeats,
    dumps: Dumps,
) -> tuple[LoweredGraph, FusionReport] | None:
    """Do the work of `fused` for one of the equal layers `repeats`; None if they are not fused alike."""
    with phase("lowering"):
        lowered = _lowered(gm, name, config, communication, agreement, stand_ins(repeats))
    comms = {node.name: found.comm for node, found in communication.items()}
    layers = Repeated(gm, lowered, repeats, comms.__getitem__)
    measure = _kernel_times(lowered, config, alone=agreement is None)
    with phase("fusion"):
        kept = set(freeable) - layers.left_out_inputs()
        ops, report = fuse_before_combining(
            lowered, kept, measure=measure, refuse=_refuse_fused, beside=layers.left_out_bytes
        )
        graph = layers.written(ops)
        if graph is None:
            return None
        ops = combine(graph.ops, graph, report, freeable)
    dumps.write("ir", "lowered", lambda: f"{layers}\n{lowered}")
    return replace(graph, ops=ops), report


def _generates(config: Config, device: torch.device) -> bool:
    return bool(config.native) and generators.has_generator(device.type)


def _refuse(device: torch.device, body: Body) -> str | None:
    return generators.generator_for(device.type).refuse(body)


def _refuse_fused(device: torch.device, body: Body) -> str | None:
    return generators.generator_for(device.type).refuse_fused(body)


def _lowered(
    gm: GraphModule,
    name: str,
    config: Config,
    communication: Mapping[Node, Communication],
    agreement: GraphAgreement | None,
    stand_ins: Mapping[Node, Node],
) -> LoweredGraph:
    """Lower the graph to loop IR, with matrix products as `config.matmul` says."""

    def lowered_with(native: Callable[[Product], bool]) -> LoweredGraph:
        rounds = config.numerics == "eager"
        return lower(
            gm,
            name,
            partial(_generates, config),
            communication.get,
            native,
            _refuse,
            rounds,
            generators.refuse_attention,
            stand_ins,
        )

    measured = config.matmul == "autotune" and not torch.are_deterministic_algorithms_enabled()
    if not measured or "cuda" not in device_types(gm):
        return lowered_with(lambda product: config.matmul == "native")
    products: list[Product] = []

    def note(product: Product) -> bool:
        products.append(product)
        return False

    lowered_with(note)  # only to collect the products
    times = ProductTimes(torch.device("cuda", torch.cuda.current_device()), config.cache_dir)(products)
    if agreement is not None:
        times = agreement.agree_on_medians(times)
    return lowered_with(choice(times))


def _kernel_times(lowered: LoweredGraph, config: Config, *, alone: bool) -> KernelTimes | None:
    """Return the object that times fusions, or None if fusions are not measured.

    alone: no other rank compiles this graph. If another does, fusions are not measured: each rank would choose its own
    fusions, and the schedules that ranks compare would differ.
    """
    if not config.benchmark_fusion or not alone or torch.are_deterministic_algorithms_enabled():
        return None
    return KernelTimes(lowered, config.cache_dir)


def device_types(gm: GraphModule) -> set[str]:
    """Return the types of the devices that tensors of the graph are on."""
    values = tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _share_hints(lowered: LoweredGraph, agreement: GraphAgreement | None) -> None:
    """Replace the size hints of symbols by their medians over ranks, so that all ranks plan for the same sizes."""
    if agreement is None or not lowered.size_hints:
        return
    agreed = agreement.agree_on_medians({f"size {at}": hint for at, hint in enumerate(lowered.size_hints.values())})
    for at, symbol in enumerate(lowered.size_hints):
        lowered.size_hints[symbol] = round(agreed[f"size {at}"])
