"""From an FX graph to fused ops: equal layers are lowered and fused once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.fx import GraphModule, Node

from overlapc.agreement.rank_agreement import GraphAgreement
from overlapc.autotune.fusions import KernelTimes
from overlapc.autotune.product_choice import ProductTimes, choice
from overlapc.codegen import generators
from overlapc.config import Config
from overlapc.fusion import FusionReport, combine, fuse_before_combining, fuse_ops
from overlapc.fx.comm.gathers import shard_pads
from overlapc.fx.comm.taken_out import TAKEN_OUT
from overlapc.fx.equal_layers.repeats import KEPT, Repeats, find_repeats, place_results
from overlapc.fx.precision import is_coarse, note_coarse_once
from overlapc.ir.body import Body
from overlapc.ir.ops import LoweredGraph, tree_leaves
from overlapc.lowering import Communication, Target, lower
from overlapc.lowering.product import Product
from overlapc.planning.dumps import Dumps
from overlapc.planning.repeated_layers import Repeated, stand_ins
from overlapc.runtime.counters import count
from overlapc.runtime.phases import phase


@dataclass(frozen=True)
class GraphToFuse:
    """An FX graph with what is needed to lower and fuse it.

    freeable: inputs whose memory is freed after their last reader.
    """

    gm: GraphModule
    name: str
    config: Config
    communication: Mapping[Node, Communication]
    agreement: GraphAgreement | None
    freeable: Collection[str]
    dumps: Dumps

    def fused(self) -> tuple[LoweredGraph, FusionReport]:
        """Lower and fuse the graph; return it in loop IR with its fused ops, and the report of fusion.

        Raise PlansDiffer if ranks fuse it in different ways: if sizes of a tensor differ between ranks, two kernels may
        have the same loops on one rank only.
        """
        lowered, report = self._fused()
        if self.agreement is not None:
            self.agreement.agree_on_kernels([op.name for op in lowered.ops])
        return lowered, report

    def _fused(self) -> tuple[LoweredGraph, FusionReport]:
        config = self.config
        with phase("lowering"):
            note_coarse_once(self.gm.graph)
            once = config.fusion and config.trace_once and config.matmul != "autotune"  # whose times ranks agree on
            repeats = self._repeats() if once else None
        while repeats is not None:
            found = self._once_for_all_layers(repeats)
            if found is not None:
                count("layers_reusing_fusion", len(repeats.stretches) - KEPT)
                return found
            repeats = repeats.in_pairs()  # a sum of residuals may be inlined in every other layer
        with phase("lowering"):
            lowered = self._lowered({})
        _share_hints(lowered, self.agreement)
        self.dumps.write("ir", "lowered", lambda: str(lowered))
        measure = self._kernel_times(lowered)
        with phase("fusion"):
            ops, report = fuse_ops(
                lowered, config.fusion, self.freeable, measure=measure, refuse=_refuse_fused, alone=self._alone()
            )
        return replace(lowered, ops=ops), report

    def _alone(self) -> Collection[str]:
        """Return the nodes whose kernels share no launch."""
        graph = self.gm.graph
        if graph.find_nodes(op="call_function", target=TAKEN_OUT):  # one launch would fill the slots of several ones
            return [node.name for node in graph.nodes]
        return shard_pads(graph)

    def _repeats(self) -> Repeats | None:
        def same(node: Node) -> Hashable:
            found = self.communication.get(node)
            if found is None:
                return is_coarse(node)
            return replace(found.comm, unit=""), found.asynchronous  # only the unit differs between layers

        place_results(self.gm.graph)
        return find_repeats(self.gm.graph, same)

    def _once_for_all_layers(self, repeats: Repeats) -> tuple[LoweredGraph, FusionReport] | None:
        """Do the work of `fused` for one of the equal layers `repeats`; None if they are not fused alike."""
        with phase("lowering"):
            lowered = self._lowered(stand_ins(repeats))
        comms = {node.name: found.comm for node, found in self.communication.items()}
        layers = Repeated(self.gm, lowered, repeats, comms.__getitem__)
        measure = self._kernel_times(lowered)
        with phase("fusion"):
            kept = set(self.freeable) - layers.left_out_inputs()
            ops, report = fuse_before_combining(
                lowered, kept, measure=measure, refuse=_refuse_fused, beside=layers.left_out_bytes
            )
            graph = layers.written(ops)
            if graph is None:
                return None
            ops = combine(graph.ops, graph, report, self.freeable, self._alone())
        self.dumps.write("ir", "lowered", lambda: f"{layers}\n{lowered}")
        return replace(graph, ops=ops), report

    def _lowered(self, stand_ins: Mapping[Node, Node]) -> LoweredGraph:
        """Lower the graph to loop IR, with matrix products as `config.matmul` says."""
        config = self.config

        target = Target(
            generates=partial(_generates, config),
            refuse=_refuse,
            refuse_attention=generators.refuse_attention,
            rounds=config.numerics == "eager",
        )

        def lowered_with(native_product: Callable[[Product], bool]) -> LoweredGraph:
            chosen = replace(target, native_product=native_product)
            return lower(self.gm, self.name, self.communication.get, chosen, stand_ins)

        measured = config.matmul == "autotune" and not torch.are_deterministic_algorithms_enabled()
        if not measured or "cuda" not in device_types(self.gm):
            return lowered_with(lambda product: config.matmul == "native")
        products: list[Product] = []

        def note(product: Product) -> bool:
            products.append(product)
            return False

        lowered_with(note)  # only to collect the products
        times = ProductTimes(torch.device("cuda", torch.cuda.current_device()), config.cache_dir)(products)
        if self.agreement is not None:
            times = self.agreement.agree_on_medians(times)
        return lowered_with(choice(times))

    def _kernel_times(self, lowered: LoweredGraph) -> KernelTimes | None:
        """Return the object that times fusions, or None if fusions are not measured.

        If another rank compiles this graph, too, fusions are not measured: each rank would choose its own fusions, and
        the schedules that ranks compare would differ.
        """
        alone = self.agreement is None
        if not self.config.benchmark_fusion or not alone or torch.are_deterministic_algorithms_enabled():
            return None
        return KernelTimes(lowered, self.config.cache_dir)


def _generates(config: Config, device: torch.device) -> bool:
    return bool(config.native) and generators.has_generator(device.type)


def _refuse(device: torch.device, body: Body) -> str | None:
    return generators.generator_for(device.type).refuse(body)


def _refuse_fused(device: torch.device, body: Body) -> str | None:
    return generators.generator_for(device.type).refuse_fused(body)


def device_types(gm: GraphModule) -> set[str]:
    """Return the types of the devices that tensors of the graph are on."""
    values = tree_leaves([node.meta.get("val") for node in gm.graph.nodes])
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _share_hints(lowered: LoweredGraph, agreement: GraphAgreement | None) -> None:
    """Replace the hints of symbols in sizes by their medians over ranks, so that all ranks plan for the same sizes.

    Other symbols, in storage offsets and strides, need not be in the graph of every rank.
    """
    in_sizes = {str(each) for view in lowered.views.values() for size in view.layout.size for each in size.free_symbols}
    hints = [(symbol, hint) for symbol, hint in lowered.size_hints.items() if symbol in in_sizes]
    if agreement is None or not hints:
        return
    agreed = agreement.agree_on_medians({f"size {at}": hint for at, (_, hint) in enumerate(hints)})
    lowered.size_hints.update((symbol, round(agreed[f"size {at}"])) for at, (symbol, _) in enumerate(hints))
