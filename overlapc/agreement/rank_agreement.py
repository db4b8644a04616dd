"""Ranks agree on the graph, on estimates and on the order of collectives, or all stop with the same error.

    with peers_of().agreement("forward", timeout_s=300) as ranks:
        ranks.agree_on_graph(text_of(graph, groups))
        times_ns = ranks.agree_on_medians(measured_ns)
        ...
        ranks.agree_on_order(collectives_in_order)

Ranks compare hashes. Only if hashes differ are texts exchanged, one for each hash, to show the first
difference. An exception that leaves the `with` block stops the other ranks at once, with that reason.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d

from overlapc.agreement.graph_text import GraphText
from overlapc.agreement.meeting import Meetings, Notes, differences, name_ranks
from overlapc.agreement.timed_store import connected
from overlapc.errors import RanksDisagree
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.profiles.profile_file import profile_from_json, profile_to_json

__all__ = ["ComparedGraphs", "GraphAgreement", "GraphText", "Peers", "peers_of", "peers_spanned_by"]

Shapes = Sequence[Sequence[int]]

_SHOWN_VARIANTS = 4  # different texts that an error shows; further ones are only counted
_SHOWN_CHARS = 200  # characters of a line that an error shows
_SAME_CODE = (
    "every rank must run the same model code on inputs of the same kinds; look for branches on the rank, and for"
    " batch sizes of 0 or 1 on some ranks only, for which torch traces separate graphs (use drop_last, or pad them);"
    " with dynamic=False, all ranks need batches of the same sizes"
)
_SAME_OPTIONS = (
    "the graphs are equal, so the ranks plan them differently: give all ranks the same options (and OVERLAPC_"
    " variables), the same versions of overlapc and torch, and the same kind of device"
)


class ComparedGraphs(NamedTuple):
    """What ranks found when they compared their graphs."""

    cached: bool = False  # all have cached their graph with the same order of collectives
    difference: str = ""  # text that shows the first difference between graphs that have the same collectives


class PlansDiffer(RanksDisagree):
    """Ranks planned other kernels for equal graphs, in which tensors have other sizes on other ranks."""


def _joined(values: Mapping[int, bytes]) -> bytes:
    return b"".join(values.values())


class Peers:
    """The ranks that compile together, from the side of one of them. Counts their compilations."""

    def __init__(
        self, store: dist.Store | Callable[[], dist.Store], rank: int, ranks: Iterable[int], run: str = ""
    ) -> None:
        """run: distinguishes jobs over one store; must be equal on all ranks."""
        self.meetings = Meetings(store, rank, tuple(ranks), run)
        self.agreed: defaultdict[Any, list[Any]] = defaultdict(list)  # function -> entry of each of its graphs, by age
        self.compared: set[Any] = set()  # steps of whose inputs these ranks have compared the sizes
        self.frame_numbering = -1  # of the latest graph; another one since `torch._dynamo.reset()`
        self.is_grid = False  # whether they are known to be a grid whose rows are equally spaced, on every axis
        self._compilations = itertools.count(1)

    def spanned(self, groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the ranks that some of this rank's groups span; all of these peers if that is not certain. Equal on
        the ranks returned, which exchange nothing."""
        rank, widest = self.meetings.rank, _widest(groups)
        if len(widest) == 1:
            return tuple(sorted(widest[0]))
        if not self.is_grid:
            return self.meetings.ranks
        span = {rank}
        for group in widest:
            span = {at + other - rank for at in span for other in group}
        return tuple(sorted(span))

    def agreement(self, label: str, timeout_s: float, notes: Notes = MappingProxyType({})) -> GraphAgreement:
        """Return the rank agreement for the next graph. All ranks must call this the same number of times.

        label: kind of graph ("forward"); must be equal on all ranks.
        timeout_s: how long a rank waits for the others at each point.
        notes: facts about this rank that an error shows if ranks differ in them.
        """
        return GraphAgreement(self.meetings, f"compilation {next(self._compilations)} ({label})", timeout_s, notes)


class GraphAgreement:
    """Rank agreement for one graph; all ranks must call the same methods in the same order.

    Every method either returns on all ranks or raises RanksDisagree with the same text on all of them, because of
    different contents, different points, a missing rank, or a rank that failed.
    """

    def __init__(self, meetings: Meetings, name: str, timeout_s: float, notes: Notes = MappingProxyType({})) -> None:
        self.name = name
        self._meetings = meetings
        self._timeout_s = timeout_s
        self._notes = notes

    def __enter__(self) -> GraphAgreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, RanksDisagree):
            self.fail(f"{type(error).__name__}: {error}")

    def fail(self, reason: str) -> None:
        """Stop the other ranks at their present or next meeting, because this rank cannot continue."""
        first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        self._meetings.fail(
            f"rank {self._meetings.rank} failed in {self.name}: {first_line}"
            f"\nhint: the whole error is in the output of rank {self._meetings.rank}"
        )

    def agree_on_graph(
        self, text: GraphText, cached_order: str = "", collectives: Sequence[str] = ()
    ) -> ComparedGraphs:
        """Raise RanksDisagree unless all ranks compile the graph that `text` describes, or one that has the same
        `collectives`, which are not empty, and the same operators; other ones only if torch traced it for other inputs
        (a size of 1, or a symbolic one).

        cached_order: a hash of the order of collectives in this rank's cached compilation of the graph; "" if it has
        none. If all ranks have the same for the same graph, all may use it and need no further agreement.
        """
        at, what = f"{self.name}, graph", "ranks compile different graphs"
        texts = {"graph": text.lines, "collectives": collectives, "operators": text.operators, "inputs": text.inputs}
        digests = {name: _digest(lines).decode() if lines else "" for name, lines in texts.items()}
        found = self._compare_hashes("graph", cached_order, hashes_of(text.sizes), texts=digests)
        difference = ""
        if len(found["graphs"]) > 1:
            difference = self._difference(at, what, _SAME_CODE, found["graphs"], text.lines)
            same = found["equal"]
            if not collectives or not same["collectives"] or (same["inputs"] and not same["operators"]):
                raise RanksDisagree(difference)
        if found["group"]:
            own = next((lines for ranks, lines in text.sizes.items() if _name_of(ranks) == found["group"]), [])
            in_group = f"{what}: other sizes in one group"
            raise RanksDisagree(self._difference(at, in_group, _SAME_CODE, found["variants"], own))
        return ComparedGraphs(bool(found["same"]) and not difference, difference)

    def agree_on_kernels(self, names: Sequence[str]) -> None:
        """Raise PlansDiffer unless all ranks have fused the graph into kernels of these names, in this order."""
        self._agree("kernels", "ranks fuse kernels in different ways", names, error=PlansDiffer)

    def compare_cached(
        self, cached: str, sizes: Mapping[tuple[int, ...], str], shapes: Shapes
    ) -> tuple[bool, list[tuple[int, int, int]], bool]:
        """Return whether all ranks have the same `cached`, which is not empty, and the ranks of each group the same
        sizes; (index, dim, median) of each of the `shapes` in which ranks have different sizes of at least 2, or
        only some ranks a symbolic one; and whether any of these is fixed on any rank.

        shapes: a symbolic size is negative.
        """
        found = self._compare_hashes("cached", cached, sizes, shapes)
        dims = [(at, dim, median) for at, dim, median, _ in found["dims"]]
        return bool(found["same"]) and not found["group"], dims, any(fixed for *_, fixed in found["dims"])

    def _compare_hashes(
        self,
        stage: str,
        cached: str,
        sizes: Mapping[tuple[int, ...], str],
        shapes: Shapes = (),
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        of_groups = {_name_of(ranks): digest for ranks, digest in sizes.items()}
        own = json.dumps([cached, of_groups, shapes, dict(texts)]).encode()
        found: dict[str, Any] = json.loads(self._agree(stage, "ranks exchange hashes", (), own, _compared_hashes))
        return found

    def agree_on_order(self, lines: Sequence[str]) -> None:
        """Raise RanksDisagree unless all ranks issue the same collectives, one for each of `lines`, in this order."""
        self._agree("order of collectives", "ranks would issue collectives in different orders", lines)

    def agree_on_medians(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the median over ranks of each value, bitwise equal on every rank; names must be equal on all ranks.

        Raise ValueError for a value that is not finite.
        """
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} was estimated as {value}; only finite values have a median")
        return self._agree_on_numbers("estimates", "ranks have estimates of different nodes", values, np.median)

    def agree_on_largest(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the maximum over ranks of each size; sizes must be less than 2^53, and names equal on all ranks."""
        largest = self._agree_on_numbers("sizes", "ranks have different buffers", sizes, np.max)
        return {name: int(size) for name, size in largest.items()}

    def _agree_on_numbers(
        self, stage: str, what: str, values: Mapping[str, float], reduce: Callable[..., Any]
    ) -> dict[str, float]:
        """Return each value reduced over ranks by `reduce`, a function like np.median that takes an axis."""
        names = sorted(values)
        own = np.array([values[name] for name in names], dtype="<f8").tobytes()
        agreed = self._agree(stage, what, names, own, partial(_each_value, reduce), PlansDiffer)
        return dict(zip(names, np.frombuffer(agreed, dtype="<f8").tolist(), strict=True))

    @property
    def index_and_count(self) -> tuple[int, int]:
        """(index of this rank among the ranks that compile together, number of these ranks)."""
        ranks = self._meetings.ranks
        return ranks.index(self._meetings.rank), len(ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that compile together, in order."""
        return self._meetings.ranks

    def exchange(self, stage: str, text: str) -> list[str]:
        """Exchange texts: return every rank's text at this point, in order of rank."""
        return list(json.loads(self._agree(stage, "ranks exchange texts", (), text.encode(), _listed)))

    def agree_on_tables(self, tables: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Return, for every name that any rank has, the longest of the ranks' tables; the same on every rank.

        Tables are not merged, because times measured by one rank belong together. Of equally long tables, that of the
        first rank is returned.
        """
        text = zlib.compress(json.dumps(tables).encode(), 1)
        return dict(json.loads(self._agree("tables", "ranks exchange tables", (), text, _longest)))

    def agree_on_profile(self, profile: DeviceProfile) -> DeviceProfile:
        """Return one profile for all ranks, with the median of each number, because hosts measure different ones."""
        data = profile_to_json(profile)
        agreed = self.agree_on_medians(dict(_numbers(data)))
        return profile_from_json(_replaced(data, agreed))

    def _agree(
        self,
        stage: str,
        what: str,
        lines: Sequence[str],
        extra: bytes = b"",
        combine: Callable[[Mapping[int, bytes]], bytes] = _joined,
        error: type[RanksDisagree] = RanksDisagree,
    ) -> bytes:
        """Return `combine` of every rank's `extra`, by rank in order. Raise the error if any `lines` differ."""
        at = f"{self.name}, {stage}"
        digest = _digest(lines)
        answer = self._meetings.meet(at, digest + extra, partial(_compare, combine), self._timeout_s, notes=self._notes)
        head, _, combined = answer.partition(b"\n")
        comparison = json.loads(head)
        if not comparison["digest"]:
            raise error(self._difference(at, what, _SAME_OPTIONS, comparison["variants"], lines))
        if comparison["digest"] != digest.decode():
            raise RanksDisagree(
                f"{at}: the store holds the answer of another job\n"
                "hint: start each job with a store of its own (another port or file)"
            )
        return combined

    def _difference(self, at: str, what: str, hint: str, variants: list[list[int]], lines: Sequence[str]) -> str:
        """Return text that shows the first difference between the `lines` of ranks; variants: those with the same."""
        speakers = [ranks[0] for ranks in variants[:_SHOWN_VARIANTS]]
        own = json.dumps([dict(self._notes), list(lines)]).encode()
        text = zlib.compress(own, 1) if self._meetings.rank in speakers else b""
        split = " against ".join(name_ranks(ranks) for ranks in variants[:_SHOWN_VARIANTS])
        explain = partial(_explain, f"{at}: {what}", hint, variants)
        shown = self._meetings.meet(f"{at} ({what}: {split})", text, explain, self._timeout_s, contributors=speakers)
        return shown.decode()


def hashes_of(sizes: Mapping[tuple[int, ...], Sequence[str]]) -> dict[tuple[int, ...], str]:
    """Return the hash of each group's lines in `GraphText.sizes`."""
    return {ranks: _digest(lines).decode() for ranks, lines in sizes.items()}


def _name_of(ranks: tuple[int, ...]) -> str:
    """Return a short name of a group's ranks, of which there may be thousands."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


def _digest(lines: Sequence[str]) -> bytes:
    """Return the hash of lines as 64 hexadecimal digits."""
    running = hashlib.sha256()
    for line in lines:
        running.update(line.encode())
        running.update(b"\0")
    return running.hexdigest().encode()


def _compare(combine: Callable[[Mapping[int, bytes]], bytes], values: Mapping[int, bytes]) -> bytes:
    """Return the common digest with the combined values, or else the ranks of each digest, most frequent first."""
    by_digest: dict[bytes, list[int]] = {}
    for rank in sorted(values):
        by_digest.setdefault(values[rank][:64], []).append(rank)
    if len(by_digest) == 1:
        (digest,) = by_digest
        return (
            json.dumps({"digest": digest.decode()}).encode()
            + b"\n"
            + combine({rank: values[rank][64:] for rank in sorted(values)})
        )
    return json.dumps({"digest": "", "variants": _most_frequent_first(by_digest)}).encode()


def _most_frequent_first(by_digest: Mapping[Any, list[int]]) -> list[list[int]]:
    return sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _compared_hashes(values: Mapping[int, bytes]) -> bytes:
    """Return whether all ranks have the same cached, a group whose ranks have different sizes, with its variants, the
    dims in which shapes differ, the ranks of each graph, and which texts about the graph are equal on all ranks.

    values: by rank, what it has cached, the hash of the sizes of each of its groups, shapes, and the hashes of texts.
    """
    cached, all_shapes = set(), []
    graphs: dict[str, list[int]] = {}
    all_texts: defaultdict[str, set[str]] = defaultdict(set)
    by_group: dict[str, dict[str, list[int]]] = {}
    for rank in sorted(values):
        own, sizes, shapes, texts = json.loads(values[rank])
        cached.add(own)
        for name, digest in texts.items():
            all_texts[name].add(digest)
        graphs.setdefault(texts.get("graph", ""), []).append(rank)
        all_shapes.append(shapes)
        for group, digest in sizes.items():
            by_group.setdefault(group, {}).setdefault(digest, []).append(rank)
    apart = next((group for group, by_digest in by_group.items() if len(by_digest) > 1), "")
    variants = _most_frequent_first(by_group[apart]) if apart else []
    found = {
        "same": len(cached) == 1 and "" not in cached,
        "group": apart,
        "variants": variants,
        "dims": _unequal_dims(all_shapes),
        "graphs": _most_frequent_first(graphs),
        "equal": {name: len(digests) == 1 for name, digests in all_texts.items()},
    }
    return json.dumps(found).encode()


def _unequal_dims(shapes: Sequence[Shapes]) -> list[tuple[int, int, int, bool]]:
    """Return (index, dim, median size, whether a rank has a fixed size there) of dims in which ranks differ, be it only
    in whether the size is symbolic; none if their numbers of shapes or dims differ.

    Without dims that have a size of 0 or 1 on some rank, for which torch always traces a graph of its own.
    """
    if len({tuple(map(len, of_rank)) for of_rank in shapes}) != 1:
        return []
    found = []
    for at, shape in enumerate(shapes[0]):
        for dim in range(len(shape)):
            given = [of_rank[at][dim] for of_rank in shapes]
            sizes = sorted(map(abs, given))
            if sizes[0] > 1 and len(set(given)) > 1:
                found.append((at, dim, sizes[len(sizes) // 2], max(given) > 0))
    return found


def _each_value(reduce: Callable[..., Any], rows: Mapping[int, bytes]) -> bytes:
    """Reduce the rows of values of all ranks to one row."""
    table = np.frombuffer(b"".join(rows.values()), dtype="<f8").reshape(len(rows), -1)
    return bytes(reduce(table, axis=0).astype("<f8").tobytes())


def _listed(values: Mapping[int, bytes]) -> bytes:
    return json.dumps([text.decode() for text in values.values()]).encode()


def _longest(values: Mapping[int, bytes]) -> bytes:
    longest: dict[str, dict[str, float]] = {}
    for text in values.values():
        for name, table in json.loads(zlib.decompress(text)).items():
            if len(table) > len(longest.get(name, ())):
                longest[name] = table
    return json.dumps(longest, sort_keys=True).encode()


def _explain(title: str, hint: str, variants: Sequence[Sequence[int]], values: Mapping[int, bytes]) -> bytes:
    """Return the first difference of each text from the most frequent one."""
    statements = {rank: json.loads(zlib.decompress(text)) for rank, text in values.items()}
    texts = {rank: lines for rank, (_, lines) in statements.items()}
    common, *others = [(ranks, texts[ranks[0]]) for ranks in variants[:_SHOWN_VARIANTS]]
    parts = [title]
    for ranks, lines in others:
        first = next(
            (i for i, (ours, theirs) in enumerate(zip(common[1], lines)) if ours != theirs),  # noqa: B905  # by length below
            min(len(common[1]), len(lines)),
        )
        parts.append(f"first difference at line {first + 1}:")
        parts.extend(_one_side(side, text, first) for side, text in (common, (ranks, lines)))
    unshown = [rank for ranks in variants[_SHOWN_VARIANTS:] for rank in ranks]
    if unshown:
        parts.append(f"{len(variants) - _SHOWN_VARIANTS} more variants on {name_ranks(unshown)}")
    parts.extend(differences({rank: notes for rank, (notes, _) in statements.items()}))
    parts.append(f"hint: {hint}")
    return "\n".join(parts).encode()


def _one_side(ranks: Sequence[int], lines: Sequence[str], index: int) -> str:
    line = lines[index] if index < len(lines) else f"(ends after {len(lines)} lines)"
    if len(line) > _SHOWN_CHARS:
        line = line[: _SHOWN_CHARS - 4] + " ..."
    return f"   {name_ranks(ranks)} ({len(ranks)}): {line}"


def _numbers(data: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield (path, value) of every float in a profile's JSON; counts and sizes are integers, which are not measured."""
    if isinstance(data, float):
        yield path, data
    elif isinstance(data, dict):
        for key in sorted(data):
            yield from _numbers(data[key], f"{path}/{key}")
    elif isinstance(data, list):
        for at, item in enumerate(data):
            yield from _numbers(item, f"{path}/{at}")


def _replaced(data: Any, numbers: Mapping[str, float], path: str = "") -> Any:
    """Return `data` with its floats replaced by the `numbers` at their paths."""
    if isinstance(data, float):
        return numbers[path]
    if isinstance(data, dict):
        return {key: _replaced(value, numbers, f"{path}/{key}") for key, value in data.items()}
    if isinstance(data, list):
        return [_replaced(item, numbers, f"{path}/{at}") for at, item in enumerate(data)]
    return data


def _widest(groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the groups that are not part of another one, in their order."""
    found = list(dict.fromkeys(groups))
    return [group for group in found if not any(set(group) < set(other) for other in found)]


def _shape(groups: Iterable[tuple[int, ...]]) -> str:
    """Return the distances within each of one rank's groups; on a regular grid they are equal for all ranks."""
    return json.dumps([[rank - min(group) for rank in sorted(group)] for group in groups])


class _Process:
    """This process's `Peers` objects, which count compilations over the whole job."""

    def __init__(self) -> None:
        self._default_store: dist.Store | None = None
        self._generation = 0
        self._peers: dict[tuple[int, ...], Peers] = {}
        self._spans: dict[frozenset[tuple[int, ...]], set[int]] = {}  # groups of this rank -> the ranks that they span

    def peers_of(self, ranks: Iterable[int] | None) -> Peers:
        if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
            return Peers(dist.HashStore(), 0, (0,))  # one process: no other rank
        default = distributed_c10d._get_default_store()
        if default is not self._default_store:
            self._default_store = default
            self._generation += 1
            self._peers, self._spans = {}, {}
        members = tuple(sorted(set(range(dist.get_world_size()) if ranks is None else ranks)))
        if members not in self._peers:
            self._peers[members] = Peers(self._clone, dist.get_rank(), members, self._run())
        return self._peers[members]

    def peers_spanned_by(self, groups: Iterable[tuple[int, ...]], timeout_s: float) -> Peers:
        """See the function of this name."""
        widest = _widest(groups)
        span, shapes = set(widest[0]), {_shape(widest)}
        first = self.peers_of(span)
        if len(widest) == 1:
            return first
        key = frozenset(widest)
        if key in self._spans:
            return self.peers_of(self._spans[key])
        for group in widest[1:]:
            meetings, name = self.peers_of(group).meetings, f"a graph with {len(widest)} process groups"
            with GraphAgreement(meetings, name, timeout_s) as agreement:
                texts = agreement.exchange("ranks of the other groups", json.dumps([sorted(span), sorted(shapes)]))
            for ranks, others in map(json.loads, texts):
                span.update(ranks)
                shapes.update(others)
        self._spans[key] = span
        peers = self.peers_of(span)
        peers.is_grid = len(shapes) == 1 and len(span) == math.prod(map(len, widest))
        return peers

    def _clone(self) -> dist.Store:
        """Return a new connection to the store: a connection handles one request at a time, so it is not shared."""
        assert self._default_store is not None
        return connected(self._default_store)

    def _run(self) -> str:
        # Each restart has a store of its own. TORCHELASTIC_RESTART_COUNT differs between hosts: it counts own failures.
        return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{self._generation}"


_process = _Process()


def peers_of(ranks: Iterable[int] | None = None) -> Peers:
    """Return the `Peers` of this process: the global `ranks` (default: all ranks of the job).

    The same ranks get the same object until the default process group is created again, so that compilations are
    counted over the whole job. Without a process group, or with torch's fake one, the process is its only peer.
    """
    return _process.peers_of(ranks)


def peers_spanned_by(groups: Iterable[tuple[int, ...]], timeout_s: float) -> Peers:
    """Return the ranks that compile a graph together whose collectives use `groups`, the groups of this rank in the
    order of the graph.

    A rank knows only the ranks of its own groups. With several groups, the ranks of each group after the first tell
    each other what the groups before it span; on a mesh of any ranks these are all ranks of its axes. They do so the
    first time that this rank uses these groups: later a rank may compile alone.
    """
    return _process.peers_spanned_by(groups, timeout_s)
