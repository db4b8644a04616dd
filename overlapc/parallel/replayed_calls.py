"""Calls, within equal blocks, of methods of an object that is made in the same trace and given to all of them.

    cache = DynamicCache()                                              # transformers, unless `use_cache=False`
    for layer in layers: x = layer(x, cache)                            # in each layer:
        keys, values = cache.update(keys, values, self.layer_idx)

Such a call may change the object, and depend on numbers in which the blocks differ. Dynamo therefore traces it for each
block, whose other nodes are copied (`replayed_blocks.py`). A number that a block gives to such calls only, and that
Dynamo has not read before, may differ between the blocks: then the rest of the block does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import WeakSet

from torch import fx
from torch._dynamo import exc
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.lazy import LazyConstantVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import CompileContext, Source


class Unfit(Exception):
    """Why a block has to be traced, or why its trace cannot be copied for other blocks."""


_differing: WeakSet[CompileContext] = WeakSet()  # compilations in which a call was traced in another way


def may_differ() -> bool:
    """Whether a call was traced in another way than that of the first block while Dynamo compiled this frame."""
    return CompileContext.try_get() in _differing


def _trace_again(reason: str) -> NoReturn:
    """Make Dynamo trace the frame again, with each block that is given objects traced by itself."""
    context = CompileContext.try_get()
    assert context is not None, "blocks are only replayed while Dynamo compiles"
    _differing.add(context)
    raise exc.UnspecializeRestartAnalysis(restart_reason=reason)  # the one that forgets where Dynamo speculated


@dataclass(frozen=True)
class Given:
    """A tensor that a block gives to a call."""

    node: fx.Node


@dataclass(frozen=True)
class Number:
    """A number that a block gives to a call and that Dynamo has not read before."""

    source: Source
    kind: type


@dataclass(frozen=True)
class MethodCall:
    """A call of the method `name` of the object at position `owner`, and what Dynamo traced for it."""

    owner: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nodes: tuple[fx.Node, ...]
    result: Any  # Dynamo's variable for a tensor, or for a tuple of tensors

    @property
    def results(self) -> dict[fx.Node, Any]:
        """Dynamo's variables for the result's tensors, by node."""
        return {_node(each): each for each in _tensors(self.result)}

    @property
    def form(self) -> Any:
        """What has to be the same for each block: what the nodes compute, and which of them the result holds, in which
        nested tuples."""
        held = [self.nodes.index(_node(each)) if _node(each) in self.nodes else None for each in _tensors(self.result)]
        return list(map(_form, self.nodes)), held, _nested(self.result)

    @property
    def given(self) -> list[Any]:
        """What is nested in the arguments: each a `Given`, a `Number` or a constant."""
        return list(_leaves((self.args, self.kwargs)))

    def traced(self, tx: Any, owner: Any, there: Callable[[Given | Number], Any]) -> MethodCall:
        """Trace this call for another block. there: returns Dynamo's variable for what that block gives.

        If that does not give the same nodes and a result of the same form, Dynamo traces the frame again.
        """
        last = next(iter(reversed(tx.output.graph.nodes)), None)
        args = [_rebuilt(each, there) for each in self.args]
        kwargs = {name: _rebuilt(each, there) for name, each in self.kwargs.items()}
        result = owner.var_getattr(tx, self.name).call_function(tx, args, kwargs)
        again = replace(self, nodes=tuple(nodes_after(tx.output.graph, last)), result=result)
        if again.form != self.form:
            _trace_again(f"{self.name} does not do the same for equal blocks")
        for ours, theirs in zip(_tensors(self.result), _tensors(result), strict=True):
            theirs._is_name_set = ours._is_name_set  # whether later variables that hold it name it
        return again


class Calls:
    """Records the calls of methods of `objects`, Dynamo's variables, while a block is traced."""

    def __init__(self, tx: Any, objects: Sequence[Any], aside: Callable[[], AbstractContextManager[None]]) -> None:
        """aside: entered around each call that is recorded."""
        self._stored: dict[Any, dict[str, Any]] = tx.output.side_effects.store_attr_mutations
        self._objects, self._aside = objects, aside
        self.made: list[tuple[int, MethodCall]] = []  # with the number of nodes that were traced before
        self.unfit = ""  # why the block depends on the objects in another way
        self.within = False  # whether such a call is being traced

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls made within this context."""
        _recordings.append(self)
        for each in self._objects:
            each.__class__, _recording_of[id(each)] = _Watched, self
        self._watch_attributes()
        try:
            yield
        finally:
            for each in self._objects:
                each.__class__ = UserDefinedObjectVariable
                del _recording_of[id(each)]
                if each in self._stored:
                    self._stored[each] = dict(self._stored[each])
            _recordings.pop()

    def _watch_attributes(self) -> None:
        for each in self._objects:
            if each in self._stored:
                self._stored[each] = _Attributes(self._stored[each], self)

    def note(self, why: str) -> None:
        """Note why this block, and each block within it that is being traced, depends on an object."""
        if not self.within:
            for each in _recordings[_recordings.index(self) :]:
                each.unfit = why

    def call(self, tx: Any, method: _Method, args: Sequence[Any], kwargs: dict[str, Any], call: Any) -> Any:
        """Trace one call by `call`, and record it."""
        for inner in _recordings[_recordings.index(self) + 1 :]:
            inner.unfit = f"it calls {method.name} of an object that it is not given"
        given = [_recorded(each) for each in args]
        named = {name: _recorded(each) for name, each in kwargs.items()}
        before = nodes_after(tx.output.graph, None)
        self.within = True
        try:
            with self._aside():
                result = call(tx, list(map(_unread, args)), {name: _unread(each) for name, each in kwargs.items()})
        finally:
            self.within = False
            self._watch_attributes()
        nodes = tuple(nodes_after(tx.output.graph, before[-1] if before else None))
        owner = next(at for at, each in enumerate(self._objects) if each is method.obj)
        if any(each is _UNKNOWN for each in (*given, *named.values())):
            self.note(f"it gives {method.name} something else than tensors and constants")
        elif any(type(each) is not TensorVariable or _node(each) not in nodes for each in _tensors(result)):
            self.note(f"{method.name} returns something else than tensors that it computes")
        else:
            self.made.append((len(before), MethodCall(owner, method.name, tuple(given), named, nodes, result)))
        return result


_recordings: list[Calls] = []  # of the blocks that are being traced, outermost first
_recording_of: dict[int, Calls] = {}  # by the id of Dynamo's variable for an object
_UNKNOWN = object()


class _Attributes(dict[str, Any]):
    """What the code traced so far has stored in the attributes of an object whose use by a block is recorded."""

    def __init__(self, stored: dict[str, Any], calls: Calls) -> None:
        super().__init__(stored)
        self._calls = calls

    def __getitem__(self, name: str) -> Any:
        self._calls.note(f"it reads {name} of an object that it is given")
        return super().__getitem__(name)

    def items(self) -> Any:
        self._calls.note("it reads the attributes of an object that it is given")
        return super().items()


class _Watched(UserDefinedObjectVariable):
    """Dynamo's variable for an object whose use by a block is recorded."""

    def var_getattr(self, tx: Any, name: str) -> Any:
        found = super().var_getattr(tx, name)
        calls = _recording_of[id(self)]
        if type(found) is UserMethodVariable and not calls.within:
            return _Method(found.fn, self, source_fn=found.source_fn, source=found.source, name=name)
        self._note(name)
        return found

    def call_method(self, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        self._note(name)
        return super().call_method(tx, name, *args, **kwargs)

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        if name != "__dataclass_fields__":  # of its class; it decides how inputs are cast
            self._note(name)
        return super().call_obj_hasattr(tx, name)

    def _note(self, name: str) -> None:
        _recording_of[id(self)].note(f"it reads {name} of an object that it is given")


class _Method(UserMethodVariable):
    """Dynamo's variable for a method whose calls are recorded."""

    def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name

    def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        calls = _recording_of.get(id(self.obj))
        if calls is None or calls.within:
            return super().call_function(tx, args, kwargs)
        return calls.call(tx, self, args, kwargs, super().call_function)


def nodes_after(graph: fx.Graph, last: fx.Node | None) -> list[fx.Node]:
    """Return the nodes after `last` that are no inputs, in order; all if there is no `last`."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        if node.op != "placeholder":
            found.append(node)
    return found[::-1]


def _nested(result: Any) -> Any:
    """Return how tuples are nested in a result, with the types of what is no tuple."""
    result = result.realize()
    return tuple(map(_nested, result.items)) if type(result) is TupleVariable else type(result)


def _tensors(result: Any) -> list[Any]:
    """Return Dynamo's variables for the tensors of a result, or whatever else is nested in its tuples."""
    result = result.realize()
    return [each for item in result.items for each in _tensors(item)] if type(result) is TupleVariable else [result]


def _leaves(recorded: Any) -> Iterator[Any]:
    nested = recorded.values() if isinstance(recorded, dict) else recorded if isinstance(recorded, tuple) else None
    if nested is None:
        yield recorded
    for each in nested or ():
        yield from _leaves(each)


def _node(tensor: Any) -> Any:
    return tensor.as_proxy().node if type(tensor) is TensorVariable else None


def _form(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    described = [getattr(value, name, None) for name in ("shape", "dtype", "device", "requires_grad")]
    return node.op, node.target, described


def _recorded(given: Any) -> Any:
    """Return what an argument is in terms of the block; `_UNKNOWN` if that is not known."""
    if isinstance(given, LazyConstantVariable) and given.source is not None and not given.is_realized():
        return Number(given.source, given.peek_type())
    given = given.realize()
    if type(given) is TensorVariable:
        return Given(given.as_proxy().node)
    if isinstance(given, ConstantVariable):
        return given.value
    if type(given) is TupleVariable:
        items = tuple(map(_recorded, given.items))
        return _UNKNOWN if _UNKNOWN in items else items
    if type(given) is ConstDictVariable:
        keys = [key.vt.realize() for key in given.items]
        values = [_recorded(value) for value in given.items.values()]
        if _UNKNOWN not in values and all(isinstance(key, ConstantVariable) for key in keys):
            return {key.value: value for key, value in zip(keys, values, strict=True)}
    return _UNKNOWN


def _rebuilt(recorded: Any, there: Callable[[Given | Number], Any]) -> Any:
    """Return Dynamo's variable for an argument of another block's call."""
    if isinstance(recorded, Given | Number):
        return there(recorded)
    if isinstance(recorded, tuple):
        return TupleVariable([_rebuilt(each, there) for each in recorded])
    if isinstance(recorded, dict):
        items: Any = {ConstantVariable.create(key): _rebuilt(value, there) for key, value in recorded.items()}
        return ConstDictVariable(items, dict, mutation_type=ValueMutationNew())
    return ConstantVariable.create(recorded)


def _unread(given: Any) -> Any:
    """Return a copy of a number that Dynamo has not read, so that a call which reads it does not hide later reads."""
    if isinstance(given, LazyConstantVariable) and not given.is_realized():
        return LazyConstantVariable.create(given.original_value(), given.source)
    return given
