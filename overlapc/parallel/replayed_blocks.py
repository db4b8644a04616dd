"""Have Dynamo trace only the first of several equal sharded blocks, and copy its nodes for the others.

    layers.0(x)    traced: nodes, and guards such as `layers[0].training == True`
    layers.1(x)    the guards hold for layers[1] in place of layers[0]: the same nodes, over the parameters of layers.1

Dynamo guards everything that it reads while tracing, so if all guards of a traced block also hold for another block
(with that block's name in them), tracing the other block would give the same nodes. The guards are then installed for
that block, too: a later change to it recompiles. The captured graph equals the one from tracing every block. Where a
trace may depend on something else, or has side effects, Dynamo traces the block as usual: see `Unfit`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.current_scope_id import current_scope_id, enter_new_scope
from torch._dynamo.guards import install_guard
from torch._dynamo.source import AttrSource, UnspecializedNNModuleSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyConstantVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Guard, Source, TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from overlapc.fx.constants import exactly
from overlapc.parallel.guarded import Compared, compared, is_within, subject
from overlapc.parallel.replayed_calls import Calls, Given, MethodCall, Number, Unfit, may_differ, nodes_after
from overlapc.runtime.counters import count

_BLOCKS = "overlapc_blocks"  # attribute of Dynamo's tracer of a graph: the traced blocks, by the form of their inputs
_KEYS = "overlapc_keys"  # another: the keys of parameters that it read, see `_KeyOf`
# attributes of a module: its hooks -> the hooks among them that are called in another way
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
_UNREADABLE = (AttributeError, LookupError, TypeError)  # raised for a source that has no value


def replay(call: Any) -> None:
    """Make Dynamo replay `call(module, *args, **kwargs)`, a function of this package, for equal modules."""
    VariableBuilder._id_dispatch()[id(call)] = lambda builder, value: _Call(value, source=builder.source)


def guard_on_forms(key_of: Any) -> None:
    """Make Dynamo take what `key_of(module, name, form)` returns for a constant on which it does not guard."""
    VariableBuilder._id_dispatch()[id(key_of)] = lambda builder, value: _KeyOf(value, source=builder.source)


class _KeyOf(UserFunctionVariable):
    """Dynamo's variable for the function that returns the key of a parameter."""

    def call_function(self, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        module, name, form = [each.realize() for each in args]  # a realized form is guarded
        if not isinstance(module, UnspecializedNNModuleVariable) or module.source is None:
            return super().call_function(tx, args, kwargs)
        given = name.as_python_constant(), form.as_python_constant()
        read = _KeyRead(self.fn, module.source, given, self.fn(module.value, *given))
        _keys_read(tx).append(read)
        return ConstantVariable.create(read.key)


@dataclass(frozen=True)
class _KeyRead:
    """The key of a parameter that Dynamo read while tracing."""

    key_of: Callable[..., str]
    module: Source
    given: tuple[str, str]  # the parameter's name in its module, and its form
    key: str

    def of(self, tx: Any, named: _Renamed, cache: dict[Source, Any]) -> _KeyRead:
        """Return what the same code reads in another block, in which the parameter has the same form."""
        module = named(self.module)
        return replace(self, module=module, key=self.key_of(_value(tx, module, cache), *self.given))


def _keys_read(tx: Any) -> list[_KeyRead]:
    """Return the keys that Dynamo has read so far, to be appended to."""
    found: list[_KeyRead] = _noted(tx, _KEYS, list)
    return found


def _noted(tx: Any, name: str, make: Callable[[], Any]) -> Any:
    """Return what is noted under `name` about the graph that Dynamo traces, until it has traced it: the tracer lives as
    long as Python's garbage collector pleases, and guards refer to parameters, which could not be moved until then."""
    notes = vars(tx.output.root_tracer)
    if name not in notes:
        notes[name] = make()
        tx.output.add_cleanup_hook(partial(notes.pop, name, None))
    return notes[name]


class _Call(UserFunctionVariable):
    """Dynamo's variable for the function that calls a block."""

    def call_function(self, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            inputs = _Inputs.of(tx, args, kwargs)
        except Unfit:
            return super().call_function(tx, args, kwargs)
        blocks = _noted(tx, _BLOCKS, dict).setdefault(inputs.form, [])
        for block in blocks:
            with suppress(Unfit):
                result = block.replayed(tx, inputs)
                if result is not None:
                    count("blocks_replayed")
                    return result
        recording = _Recording(tx, inputs)
        with recording.running():
            result = super().call_function(tx, args, kwargs)
        try:
            blocks.append(recording.block(result))
        except Unfit as reason:
            count(f"block not traced once: {reason}")
        return result


class _Inputs:
    """The arguments of one call of a block."""

    def __init__(self, module: Any) -> None:
        source = module.source
        self.root: Source = source.base if isinstance(source, UnspecializedNNModuleSource) else source
        self.tensors: dict[fx.Node, int] = {}
        self.variables: dict[fx.Node, Any] = {}  # Dynamo's variables for these tensors, and for results of calls
        self.objects: list[Any] = []  # Dynamo's variables for objects that were made in the same trace
        self.form: Any = None
        self.changes: Any = None

    @classmethod
    def of(cls, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Inputs:
        """Return a call's inputs; Unfit if it may depend on more than block, tensors, constants and Dynamo's guards."""
        module, *others = [each.realize() for each in args]
        output = tx.output
        if not isinstance(module, UnspecializedNNModuleVariable) or module.source is None:
            raise Unfit("a module of unknown origin")
        if output.current_tracer.parent is not None or output.current_tracer.bound_symbols or output.export:
            raise Unfit("it is traced inside a nested graph, with symbolic sizes, or for export")
        if tx.symbolic_torch_function_state.mode_stack:
            raise Unfit("a torch function mode is active")
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Unfit("saved-tensor hooks are active")
        if torch._dynamo.config.side_effect_replay_policy == "silent":
            raise Unfit("Dynamo does not record side effects")
        inputs = cls(module)
        if not str(getattr(inputs.root, "index", "")).isdigit():
            raise Unfit("it is not a member of a module list")
        given = [inputs._form(each) for each in others]
        named = [(name, inputs._form(each)) for name, each in kwargs.items()]
        inputs.changes = _changes(output.side_effects)
        inputs.form = (type(module.value), tuple(given), tuple(named), _lines(tx))
        return inputs

    def _form(self, given: Any) -> Any:
        given = given.realize()
        if isinstance(given, ConstantVariable):
            return exactly(given.value)
        if type(given) is TupleVariable:
            return tuple(map(self._form, given.items))
        if type(given) is UserDefinedObjectVariable and given.source is None and not may_differ():
            if not any(each is given for each in self.objects):
                self.objects.append(given)
            return type(given.value), next(at for at, each in enumerate(self.objects) if each is given)
        if type(given) is not TensorVariable:
            raise Unfit(f"an argument is a {type(given).__name__}")  # which the block may change
        node = given.as_proxy().node
        self.variables[node] = given
        return self.tensors.setdefault(node, len(self.tensors)), _form_of(node)


def _lines(tx: Any) -> tuple[Any, ...]:
    """Return the positions in the code of the call and its callers, which nodes record."""
    found = []
    while tx is not None:
        found.append((tx.f_code, tx.current_instruction.positions))
        tx = getattr(tx, "parent", None)
    return tuple(found)


def _form_of(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    if type(value) is not FakeTensor:
        raise Unfit(f"{node.name} is a {type(value).__name__}")
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, value.is_leaf


def _changes(effects: Any) -> Any:
    """Return what the code traced so far changed in objects that existed before, as far as a block can read it.

    Unfit if a list or dictionary that existed before was changed.
    """
    stores = {item: names for item, names in effects.store_attr_mutations.items() if item.source is not None}
    changed = [item for item in effects.mutation_user_stacks if item.source is not None or _existed(item, 1)]
    if not all(item in stores for item in changed):
        raise Unfit("a list or dictionary was changed")
    values = [value for names in stores.values() for value in names.values()]
    reached: list[Any] = []
    VariableTracker.visit(reached.append, values)
    stored = [(item, name, value) for item, names in stores.items() for name, value in names.items()]
    return stored, [(each, len(effects.mutation_user_stacks.get(each, ()))) for each in reached]


def _existed(item: Any, scope: int) -> bool:
    """Whether an object is from outside of `scope`. The outermost scope is 1; objects that no code made have 0."""
    return item.mutation_type is not None and bool(item.mutation_type.scope < scope)


def _same(first: Any, second: Any) -> bool:
    """Whether two results of `_changes` are the same; Dynamo's objects compare by identity."""
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return first is second or (isinstance(first, int | str) and first == second)


class _Recording:
    """Records what Dynamo does while it traces a block."""

    def __init__(self, tx: Any, inputs: _Inputs) -> None:
        self._tx, self._inputs = tx, inputs
        self._modes, self._annotation = GlobalStateGuard(), _annotation()
        self._effects = self._seen_effects()
        self._read: list[Source] = []
        self._keys_before = len(_keys_read(tx))
        self._changed: list[Any] = []  # objects from outside of the block
        self._before = nodes_after(tx.output.graph, None)
        self._calls = Calls(tx, inputs.objects, self._aside)
        self._changes: dict[Any, int] = {}  # number of changes of each object before the block, and by recorded calls
        self._of_calls: set[Guard] = set()  # guards that Dynamo installed first while it traced recorded calls

    def _seen_effects(self) -> Any:
        return len(self._tx.output.side_effects.tensor_hooks), len(self._tx.output.random_calls)

    def _changes_by_object(self) -> dict[Any, int]:
        return {item: len(stacks) for item, stacks in self._tx.output.side_effects.mutation_user_stacks.items()}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the sources that Dynamo reads within this context, and which outside objects change."""
        builder: Any = VariableBuilder
        build = builder.__call__

        def noted(self_: Any, value: object) -> Any:
            if not self._calls.within:
                self._read.append(self_.source)
            return build(self_, value)

        tracer, self._changes = self._tx.output.current_tracer, self._changes_by_object()
        allowed = tracer.unsafe_allow_externally_visible_side_effects
        tracer.unsafe_allow_externally_visible_side_effects = True  # as if outside of all scopes
        builder.__call__ = noted  # torch 2.12 and later record the same in `traced_sources`
        try:
            with enter_new_scope(), self._calls.recorded():
                yield
                numbers = self._changes_by_object()
                changed = [item for item, number in numbers.items() if number != self._changes.get(item)]
                self._changed = [item for item in changed if _existed(item, current_scope_id())]
        finally:
            builder.__call__ = build
            tracer.unsafe_allow_externally_visible_side_effects = allowed

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Take what Dynamo does within this context for no part of the block: it does so for each block again."""
        before, guards, keys = self._changes_by_object(), set(self._tx.output.guards), len(_keys_read(self._tx))
        yield
        for item, number in self._changes_by_object().items():
            added = number - before.get(item, 0)
            self._changes[item] = self._changes.get(item, 0) + added
            if added and (item.source is not None or _existed(item, 1)):  # which the block may read
                self._calls.unfit = "a method of an object that it is given changes something else"
        self._of_calls |= set(self._tx.output.guards) - guards
        if keys != len(_keys_read(self._tx)):
            self._calls.unfit = "a method of an object that it is given reads a parameter"

    def block(self, result: Any) -> _Block:
        """Return the traced block; Unfit if it does more than compute `result` from its inputs and its module."""
        output, root = self._tx.output, self._inputs.root
        if self._effects != self._seen_effects() or self._changed:
            raise Unfit("it has side effects, or draws Python's random numbers")
        if self._tx.output.current_tracer.bound_symbols:
            raise Unfit("it computes sizes")
        if not self._modes.check() or self._annotation != _annotation():
            raise Unfit("it changes modes")
        if self._calls.unfit:
            raise Unfit(self._calls.unfit)
        nodes = nodes_after(output.graph, None)
        if nodes[: len(self._before)] != self._before:
            raise Unfit("it removes nodes from before it")
        steps = _steps(nodes, len(self._before), self._calls.made)
        calls = [step for step in steps if isinstance(step, MethodCall)]
        nodes = [step for step in steps if isinstance(step, fx.Node)]
        inside = {*nodes, *(node for call in calls for node in call.results)}
        for each in (each for call in calls for each in call.given):
            if isinstance(each, Given) and each.node not in inside and each.node not in self._inputs.tensors:
                raise Unfit(f"it gives {each.node.name} to an object, which is not one of its inputs")
        captured: dict[fx.Node, Source] = {}
        for node in nodes:
            body = output.nn_modules.get(node.target) if node.op == "get_attr" else None
            if node.op not in ("call_function", "call_method") and not isinstance(body, fx.GraphModule):
                raise Unfit(f"{node.name} is a {node.op}")
            if body is not None and (body.graph.find_nodes(op="get_attr") or len(node.users) != 1):
                raise Unfit(f"{node.name} contains graphs, or is called twice")
            if body is not None and any(map(callable, body.meta.values())):
                raise Unfit(f"{node.name} has a policy function, which may belong to this block")
            for operand in node.all_input_nodes:
                if operand in inside or operand in self._inputs.tensors:
                    continue
                source = getattr(operand.meta.get("grapharg"), "source", None)
                if operand.op != "placeholder" or source is None:
                    raise Unfit(f"it reads {operand.name}, which is not one of its inputs")
                if is_within(source, root):
                    captured[operand] = source
        self._expect_names_of_its_own()
        return _Block(
            inputs=self._inputs,
            modes=self._modes,
            annotation=self._annotation,
            stack=dict(self._tx.nn_module_stack),
            steps=steps,
            captured=captured,
            checks=self._checks(),
            params=[read for read in _keys_read(self._tx)[self._keys_before :] if is_within(read.module, root)],
            keys={each: _keys(self._tx, each, {}) for each in output.guard_on_key_order if is_within(each, root)},
            result=_results(result, set(nodes), [*self._inputs.tensors, *captured]),
        )

    def _expect_names_of_its_own(self) -> None:
        """Raise Unfit if a tensor of the block has two names: another block may have two tensors there."""
        tracked = self._tx.output.side_effects
        cache: dict[Source, Any] = {}
        for source in self._read:
            if is_within(source, self._inputs.root):
                value = _value(self._tx, source, cache)
                if isinstance(value, torch.Tensor) and value in tracked and tracked[value].source != source:
                    raise Unfit(f"{source.name} is reachable under a second name")

    def _checks(self) -> list[_Check]:
        """Return all guards on the block, including those from before it was called: its trace may rely on them."""
        found = []
        cache: dict[Source, Any] = {}
        read = set(self._read)
        only_of_calls = {guard for guard in self._of_calls if guard.originating_source not in read}
        for guard in list(self._tx.output.guards):
            if guard in only_of_calls or not is_within(guard.originating_source, self._inputs.root):
                continue
            compare = compared(guard)
            if compare is None:
                raise Unfit(f"it has a guard of kind {guard.create_fn_name()}")
            source, given = subject(guard)
            value = _value(self._tx, source, cache)
            found.append(_Check(guard, source, given, compare, type(value), compare(given, value)))
        return found


@dataclass(frozen=True)
class _Check:
    """A guard of a traced block, and the value that it compared when the block was traced."""

    guard: Guard
    source: Source  # of the value that is compared
    given: dict[str, Any]  # the guard's other arguments
    compare: Compared
    kind: type
    expected: Any

    @property
    def same(self) -> Source | None:
        """The other source, if the guard checks that two sources are the same object."""
        return self.given.get("source_b")

    @property
    def of_tensor(self) -> bool:
        """Whether the guard refers to a tensor, as those that Dynamo makes for inputs do."""
        return "value" in self.given


@dataclass(frozen=True)
class _Block:
    """A traced block, whose nodes can be copied for equal blocks."""

    inputs: _Inputs
    modes: Any
    annotation: Any
    stack: dict[str, Any]  # the modules around it
    steps: list[fx.Node | MethodCall]  # nodes to copy, and calls to trace
    captured: dict[fx.Node, Source]  # graph inputs that its module holds
    checks: list[_Check]
    params: list[_KeyRead]  # of parameters that its module holds
    keys: dict[Source, list[Any]]  # of dictionaries that were iterated over, in order
    result: Any  # a node, or a tuple of nodes

    def replayed(self, tx: Any, inputs: _Inputs) -> Any:
        """Return the result of `inputs`, as copied nodes; None, or Unfit, if the called block differs from this one."""
        if not self.modes.check() or self.annotation != _annotation() or not _same(self.inputs.changes, inputs.changes):
            return None
        named = _Renamed(self.inputs.root, inputs.root)
        cache: dict[Source, Any] = {}
        for check in self.checks:
            value = _value(tx, named(check.source), cache)
            other = value if check.same is None else _value(tx, named(check.same), cache)
            if other is not value:
                return None
            if type(value) is not check.kind or check.compare(check.given, value) != check.expected:
                return None
        if any(_keys(tx, named(source), cache) != keys for source, keys in self.keys.items()):
            return None
        for each in (each for step in self.steps if isinstance(step, MethodCall) for each in step.given):
            if isinstance(each, Number) and type(_value(tx, named(each.source), cache)) is not each.kind:
                return None
        params: dict[str, str] = {}  # keys of the traced block's parameters -> keys of this block's
        read = [each.of(tx, named, cache) for each in self.params]
        for ours, theirs in zip(self.params, read, strict=True):
            if params.setdefault(ours.key, theirs.key) != theirs.key:  # one parameter there, two here
                return None
        copies = dict(zip(self.inputs.tensors, inputs.tensors, strict=True))
        known = set(tx.output.graph.find_nodes(op="placeholder"))
        for node, source in self.captured.items():
            given = VariableBuilder(tx, named(source))(_value(tx, named(source), cache)).as_proxy().node
            if copies.setdefault(node, given) is not given:  # it is also among the inputs
                return None
        lines = TracingContext.extract_stack()  # Dynamo would read them for each guard
        for check in self.checks:
            source, make = named(check.guard.originating_source), check.guard.create_fn
            if check.of_tensor:
                VariableBuilder(tx, source)(_value(tx, source, cache))  # this installs its guard
                continue
            if check.same is not None:
                make = partial(make.func, source_b=named(check.same))  # type: ignore[attr-defined]
            guard = source.make_guard(make)
            guard.user_stack = lines
            install_guard(guard)
        tx.output.guard_on_key_order.update(map(named, self.keys))
        _keys_read(tx).extend(read)
        for node in self.captured:
            if copies[node] not in known:
                self._set_modules(tx, node, copies[node])
        for step in self.steps:
            if isinstance(step, fx.Node):
                self._copy(tx, step, copies, params)
            else:
                self._trace(tx, step, inputs, copies, named)
        return _wrapped(tx, self.result, copies)

    def _trace(
        self, tx: Any, call: MethodCall, inputs: _Inputs, copies: dict[fx.Node, fx.Node], named: _Renamed
    ) -> None:
        def there(given: Given | Number) -> Any:
            if isinstance(given, Number):
                source = named(given.source)
                return LazyConstantVariable.create(_value(tx, source, {}), source)  # not read yet
            known = inputs.variables.get(copies[given.node])
            return _wrapped(tx, given.node, copies) if known is None else known

        new = call.traced(tx, inputs.objects[call.owner], there)
        for node, copy in zip(call.nodes, new.nodes, strict=True):
            copy.meta.update({key: node.meta[key] for key in ("stack_trace", "custom") if key in node.meta})
            self._set_modules(tx, node, copy)
            if _numberless(copy.name) != _numberless(node.name):
                copy._rename(_numberless(node.name))  # the block gave it to a variable
        copies.update(zip(call.results, new.results, strict=True))
        inputs.variables.update(new.results)

    def _copy(self, tx: Any, node: fx.Node, copies: dict[fx.Node, fx.Node], params: dict[str, str]) -> None:
        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return copies.get(value, value)
            return params.get(value, value) if isinstance(value, str) else value

        create = tx.output.current_tracer.create_node
        if node.op == "get_attr":
            body = self._copied_body(tx, node, copies, argument)
            copy = create(node.op, tx.output.install_subgraph(_numberless(str(node.target)), body), (), {})
            copy.meta = {**node.meta, "creation_timestamp": copy.meta["creation_timestamp"]}
        else:
            copy = _created_like(node, create, argument)
        if "nn_module_stack" in node.meta:
            self._set_modules(tx, node, copy)
        copies[node] = copy

    def _copied_body(
        self, tx: Any, node: fx.Node, copies: dict[fx.Node, fx.Node], argument: Callable[[Any], Any]
    ) -> fx.GraphModule:
        """Return a copy of the graph that `node` names and a checkpoint runs, over the called block's parameters."""
        body = tx.output.nn_modules[node.target]
        (caller,) = node.users
        inputs = {each.name: copies[each].name for each in caller.all_input_nodes if each in copies}
        graph = fx.Graph()
        inner: dict[fx.Node, fx.Node] = {}

        def inner_argument(value: Any) -> Any:
            return inner[value] if isinstance(value, fx.Node) else argument(value)

        for each in body.graph.nodes:
            if each.op == "placeholder":
                inner[each] = graph.placeholder(inputs.get(each.name, each.name), each.type)
                inner[each].meta = dict(each.meta)
            elif each.op == "output":
                inner[each] = graph.output(fx.node.map_aggregate(each.args[0], inner_argument))
                inner[each].meta = dict(each.meta)
            else:
                inner[each] = _created_like(each, graph.create_node, inner_argument)
            if "nn_module_stack" in each.meta:
                self._set_modules(tx, each, inner[each])
        copy = fx.GraphModule(body, graph)
        copy.meta = dict(body.meta)
        return copy

    def _set_modules(self, tx: Any, node: fx.Node, copy: fx.Node) -> None:
        """Set the modules that `copy` came from: those of `node`, under the called block."""
        (old, _), (new, _) = (next(reversed(each.values())) for each in (self.stack, tx.nn_module_stack))
        inner = list(node.meta.get("nn_module_stack", {}).items())[len(self.stack) :]
        renamed = {f"{key} of {new}": (new + path.removeprefix(old), cls) for key, (path, cls) in inner}
        copy.meta["nn_module_stack"] = {**tx.nn_module_stack, **renamed}


def _steps(nodes: Sequence[fx.Node], begin: int, calls: Iterable[tuple[int, MethodCall]]) -> list[fx.Node | MethodCall]:
    """Return `nodes` from `begin` on, each call in place of the nodes that were traced for it.

    calls: in order, with the number of nodes before each. Unfit if nodes were removed since.
    """
    steps: list[fx.Node | MethodCall] = []
    for before, call in calls:
        steps += [*nodes[begin:before], call]
        begin = before + len(call.nodes)
        if tuple(nodes[before:begin]) != call.nodes:
            raise Unfit(f"it removes nodes, and calls {call.name} of an object")
    return [*steps, *nodes[begin:]]


def _created_like(node: fx.Node, create: Callable[..., fx.Node], argument: Callable[[Any], Any]) -> fx.Node:
    """Copy `node` by `create`, with the name that Dynamo would give it there."""
    # Dynamo records no source for nodes that enter and leave contexts (autocast, no_grad).
    stack = node.meta.get("source_fn_stack", ())
    made_as = stack[-1][0] if stack else node.name
    args, kwargs = (fx.node.map_aggregate(each, argument) for each in (node.args, node.kwargs))
    copy = create(node.op, node.target, args, kwargs, _numberless(made_as), node.type)
    copy.meta = {**node.meta, **copy.meta}
    value = node.meta.get("example_value")
    for each in node.all_input_nodes if isinstance(value, torch.Tensor) else ():
        if each.meta.get("example_value") is value:  # the call returned its argument, and so does the copy
            copy.meta["example_value"] = argument(each).meta["example_value"]
    if stack:
        copy.meta["source_fn_stack"] = [*stack[:-1], (copy.name, stack[-1][1])]
    if _numberless(node.name) != _numberless(made_as):
        copy._rename(_numberless(node.name))  # Dynamo named it after the variable that holds it
    return copy


def _numberless(name: str) -> str:
    """Return `linear` for `linear_3`: the graph appends the next number."""
    return re.sub(r"_\d+$", "", name)


class _Renamed:
    """Maps the sources of a block's parts to those of another block."""

    def __init__(self, old: Source, new: Source) -> None:
        self._known = {old: new}  # `Source.clone` would rebuild the common prefixes for each source

    def __call__(self, source: Source) -> Source:
        found = self._known.get(source)
        if found is None:
            inner = {each.name: getattr(source, each.name) for each in fields(source)}
            parts = {name: self(each) for name, each in inner.items() if isinstance(each, Source)}
            found = self._known[source] = replace(source, **parts) if parts else source
        return found


def _value(tx: Any, source: Source, cache: dict[Source, Any]) -> Any:
    """Return the value of a source in the frame being compiled; Unfit if it has none."""
    try:
        return source.get_value({"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}, {}, cache)
    except _UNREADABLE as error:
        raise Unfit(f"{source.name} cannot be read: {error}") from error


def _keys(tx: Any, source: Source, cache: dict[Source, Any]) -> list[Any]:
    """Return the keys of a dictionary; for a module's hooks, how each of them is called, in place of its key.

    The key of a hook is a number that no other hook has, and on which no trace depends.
    """
    keys = list(_value(tx, source, cache))
    if not isinstance(source, AttrSource) or source.member not in _HOOKS:
        return keys
    module = _value(tx, source.base, cache)
    return [[key in getattr(module, ways) for ways in _HOOKS[source.member]] for key in keys]


def _annotation() -> Any:
    return torch.fx.traceback.get_current_meta().get("custom")


def _results(result: Any, inside: set[fx.Node], given: Sequence[fx.Node]) -> Any:
    """Return the node of a tensor, or the nodes of a tuple; Unfit for other results, and for views of the inputs."""
    if type(result) is TupleVariable:
        return tuple(_results(each.realize(), inside, given) for each in result.items)
    if type(result) is not TensorVariable:
        raise Unfit(f"it returns a {type(result).__name__}")
    node = result.as_proxy().node
    if node not in inside:
        raise Unfit("it returns an input, or what a method of an object returned")
    _form_of(node)
    memory = node.meta["example_value"].untyped_storage()._cdata
    for each in given:
        value = each.meta["example_value"]
        if not isinstance(value, torch.Tensor):  # the mesh of a DTensor
            continue
        if getattr(value, "_local_tensor", value).untyped_storage()._cdata == memory:
            raise Unfit("it returns a view of an input")
    return node


def _wrapped(tx: Any, result: Any, copies: dict[fx.Node, fx.Node]) -> VariableTracker:
    if isinstance(result, tuple):
        return TupleVariable([_wrapped(tx, each, copies) for each in result])
    like, node = result.meta["example_value"], copies[result]
    with tx.fake_mode, torch.enable_grad():
        if like.is_leaf:
            value = _empty_like(like).requires_grad_(like.requires_grad)
        else:
            value = _Computed.apply(torch.empty((), requires_grad=True), like)
    del node.meta["example_value"]
    made: Any = wrap_fx_proxy(tx, fx.Proxy(node, tx.output.current_tracer), example_value=value)
    made._is_name_set = True  # keep the name from the first block, which is that of its variable there
    return made


class _Computed(torch.autograd.Function):
    """A tensor that requires a gradient, and that code may change in place: neither a leaf nor a view of one."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return _empty_like(like)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise AssertionError("only shapes are computed from it")


def _empty_like(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
