"""One compiled graph on disk: the printed wrapper, its kernels' sources and its record.

An entry is found by `graph_key`; what it holds is text (see `stored`), and the compiled kernels have entries of their
own. Ranks take an entry only if all of them have one with the same order of collectives (`CompiledGraph.order`).
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

FORMAT = 6  # of an entry; entries of another format are not found
_SUFFIX = ".graph.json"


def find(key: str, cache_dir: Path) -> CompiledGraph | None:
    """The entry, or None when there is none that is whole and of this format."""
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
    """Writes the entry. NotCacheable when something in it has no text."""
    lost = sorted(name for name, text in graph.objects.items() if not text)
    if lost:
        raise NotCacheable(f"the wrapper calls {lost[0]}, which cannot be found again by name")
    fields = {
        field.name: encode(getattr(graph, field.name)) for field in dataclasses.fields(graph) if field.name != "record"
    }
    data = {"format": FORMAT, **fields, "record": dataclasses.asdict(graph.record)}
    text = json.dumps(data)
    _cache(cache_dir).put(key, _SUFFIX, text)


@lru_cache(None)
def _cache(root: Path) -> KernelCache:
    return KernelCache(root, "graphs")
