"""The disk cache of compiled graphs: the wrapper's code, its kernels' sources and its record.

The cache key is `graph_key`. Entries contain text only (see `stored`); compiled kernels have separate entries. Ranks
use an entry only if all of them have one with the same order of collectives (`CompiledGraph.order`).
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path

from overlapc.codegen.compiled_graph import CompiledGraph
from overlapc.documents import from_data
from overlapc.report.model import GraphRecord
from overlapc.runtime.cache import KernelCache
from overlapc.warm.fingerprint import NotCacheable
from overlapc.warm.stored import UNREADABLE, decode, encode

FORMAT = 8  # version of the entries; entries of other versions are ignored
_SUFFIX = ".graph.json"


def find(key: str, cache_dir: Path) -> CompiledGraph | None:
    """Return the entry, or None if there is none that is intact and of this format."""
    text = _cache(cache_dir).read(key, _SUFFIX)
    if text is None:
        return None
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        record = from_data(data.pop("record"), GraphRecord, "record")
        return CompiledGraph(record=record, **{name: decode(field) for name, field in data.items()})
    except UNREADABLE:
        _cache(cache_dir).drop(key, _SUFFIX)
        return None


def store(key: str, graph: CompiledGraph, cache_dir: Path) -> None:
    """Write the entry, in place of one of another order: ranks whose orders differ could not use it.

    Raises NotCacheable if it contains an object that cannot be written as text.
    """
    lost = sorted(name for name, text in graph.objects.items() if not text)
    if lost:
        raise NotCacheable(f"the wrapper calls {lost[0]}, which cannot be found again by name")
    fields = {
        field.name: encode(getattr(graph, field.name)) for field in dataclasses.fields(graph) if field.name != "record"
    }
    data = {"format": FORMAT, **fields, "record": dataclasses.asdict(graph.record)}
    earlier = find(key, cache_dir)
    if earlier is not None and earlier.order != graph.order:
        _cache(cache_dir).drop(key, _SUFFIX)
    _cache(cache_dir).put(key, _SUFFIX, json.dumps(data))


@lru_cache(None)
def _cache(root: Path) -> KernelCache:
    return KernelCache(root, "graphs")
