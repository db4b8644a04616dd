"""Reading a managed parameter: gathered inside forward, sharded everywhere else.

A module that owns managed parameters gets a subclass of its own class with one property per parameter. In a graph that
contains the whole forward of the sharded module, the property is a gather. In any other forward, and in its backward,
it returns what was gathered when that began (`gathered.py`). Elsewhere it returns the sharded DTensor parameter, which
is what initialization, optimizers and checkpoints need.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.fsdp import UnshardHandle

from overlapc.errors import ConfigError
from overlapc.fx.versions.dynamo import compiled_alike, never_compiled_alone
from overlapc.fx.versions.sharding import in_backward, set_fsdp2_state
from overlapc.parallel import gathered
from overlapc.parallel.controls import Controls, modules_of, refusal
from overlapc.parallel.gather import ShardedParam, ShardGroup, due, unshard
from overlapc.parallel.nested import map_tensors
from overlapc.parallel.state import ModuleState
from overlapc.parallel.unreduced import (
    Gradients,
    Pending,
    discard_unsynced,
    keep_unsynced,
    managed,
    reduce_behind,
    take_unsynced,
)


class FSDPModule(Controls, fsdp2.FSDPModule):
    """Mixin for the class of every module given to `fully_shard`, which makes it an instance of FSDP2's class.

    Casts the inputs and outputs of forward, shows by its stack frames that a forward is running, and makes backward
    reduce the gradients of earlier micro-batches.
    """

    _overlapc_base: type[nn.Module]
    _overlapc_groups: tuple[ShardGroup, ...]
    _overlapc_input_dtype: torch.dtype | None
    _overlapc_output_dtype: torch.dtype | None
    _overlapc_pending: Pending  # gradients that the next forward's backward has to reduce; modules share one
    _overlapc_contains_groups: bool  # whether there are sharded modules inside this one

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class if arguments are given, as slicing a container does."""
        if args or kwargs:
            return cls._overlapc_base(*args, **kwargs)
        return object.__new__(cls)  # copying a module calls this without arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Because this method exists, Dynamo traces `_call_impl`; otherwise it would trace `forward` directly.
        if torch.compiler.is_dynamo_compiling() and isinstance(self, torch._dynamo.OptimizedModule):
            return nn.Module.__call__(self, *args, **kwargs)  # Dynamo skips __call__ of what torch.compile returned
        return call_block(self, *args, **kwargs)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # Not in __call__: this is what `model.compile()` compiles.
        args, kwargs = self._before_forward(args, kwargs)
        return self._with_output_dtype(self._run_forward(args, kwargs))

    def _run_forward(self, args: Any, kwargs: Any) -> Any:
        # Dynamo traces this within its caller only. So if it runs, the forward is not one graph.
        call = super()._call_impl  # type: ignore[misc]
        if torch.compiler.is_dynamo_compiling():
            return self._reduce_pending(call(*args, **kwargs))
        return gathered.run_gathered(self, call, args, kwargs)

    def _reduce_pending(self, output: Any) -> Any:
        """Return `output`; its backward also reduces gradients of earlier micro-batches, if this forward has to."""
        pending = self._overlapc_pending
        if pending.waiting and torch.is_grad_enabled():
            if pending.running is self:
                pending.running = None
            if pending.running is None:
                return reduce_behind(output, pending)
        return output

    def _with_output_dtype(self, output: Any) -> Any:
        return output if self._overlapc_output_dtype is None else _cast(output, self._overlapc_output_dtype)

    def _before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        pending = self._overlapc_pending
        # Only where it matters: a side effect within a checkpoint would break the graph.
        if self._overlapc_contains_groups and pending.waiting and torch.is_grad_enabled() and pending.running is None:
            pending.running = self
        if self._overlapc_input_dtype is None:
            return args, kwargs
        return _cast((args, kwargs), self._overlapc_input_dtype)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super(fsdp2.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]

    def _get_fsdp_state(self) -> Any:
        return ModuleState(self)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether later forwards reduce their gradients in backward, like FSDP2's method of this name.

            model.set_requires_gradient_sync(False)   # before all micro-batches of a step but the last
            model.set_requires_gradient_sync(True)    # before the last one's forward

        If it is off, gradients add up unsharded, in the reduce dtype and in separate memory. The backward of the next
        forward of this module, or of a sharded module inside it, that runs with it on reduces the sum. A gradient of a
        forward without reduction that arrives after it was turned on is reduced at once. recurse: also set it for the
        sharded modules inside this one.
        """
        modules = modules_of(self, recurse)
        if requires_gradient_sync:
            taken = take_unsynced(modules, self)
            if taken:
                pending = Pending({**_take_pending(modules), **taken})
                for module in modules:
                    if isinstance(module, FSDPModule):
                        module._overlapc_pending = pending
            return
        keep_unsynced(modules, _take_pending(modules))

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters, except those of sharded modules inside it, until `reshard` frees them.

        Affects calls that run eagerly; compiled code gathers within its graph. Every rank must call this. As with
        FSDP2, a forward frees the gathered parameters if its group reshards after forward, and a backward does unless
        `set_reshard_after_backward(False)` was called. `parameters()` and `state_dict()` return the shards throughout.
        async_op: return a handle; there is nothing left to wait for.
        """
        if not torch.compiler.is_dynamo_compiling():
            gathered.unshard(self)
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free the parameters that `unshard` gathered."""
        if not torch.compiler.is_dynamo_compiling():
            gathered.reshard(self)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether a backward frees what `unshard` gathered; after a compiled backward nothing stays gathered."""
        for module in modules_of(self, recurse):
            if isinstance(module, FSDPModule):
                module.__dict__["_overlapc_reshard_after_backward"] = reshard_after_backward

    def reset_iter_state(self) -> None:
        """Free gathered parameters and drop unreduced gradients, after an exception in forward or backward.

        Call it on the outermost module, on all ranks.
        """
        modules = modules_of(self, recurse=True)
        discard_unsynced(modules)
        for module in modules:
            for name, sharded in managed(module).items():  # a backward that ended in an exception took none of them
                due.pop((sharded.key, id(module._parameters[name])), None)
            if isinstance(module, FSDPModule):
                module.reshard()
                module._overlapc_pending.take()


def _take_pending(modules: Iterable[nn.Module]) -> Gradients:
    """Return the pending gradients of the modules' parameters, which are no longer pending."""
    keys = {sharded.key for module in modules for sharded in managed(module).values()}
    shared = dict.fromkeys(module._overlapc_pending for module in modules if isinstance(module, FSDPModule))
    taken: Gradients = {}
    for pending in shared:
        all_of_it = pending.take()
        taken |= {key: each for key, each in all_of_it.items() if key in keys}
        pending.hold({key: each for key, each in all_of_it.items() if key not in keys})
    return taken


def call_block(module: FSDPModule, *args: Any, **kwargs: Any) -> Any:
    """Call a sharded module. This is a separate function so that Dynamo can trace it once for equal modules."""
    return super(FSDPModule, module).__call__(*args, **kwargs)  # type: ignore[misc]


def key_of(module: nn.Module, name: str, form: str) -> str:
    """Return the key of the managed parameter `name`.

    `form` is unused here: Dynamo guards on it instead of the key (`guard_on_forms`), so one graph serves all modules
    with parameters of these forms. It names the parameters of the module that it was captured for.
    """
    return str(module.__dict__["_overlapc_keys"][name])


def prepare_dynamo(trace_once: bool) -> None:
    """Make Dynamo guard on forms of parameters instead of keys; trace_once: and trace equal sharded blocks once."""
    from overlapc.parallel.replayed_blocks import guard_on_forms, replay

    guard_on_forms(key_of)
    if trace_once:
        replay(call_block)


for _name, _theirs in vars(fsdp2.FSDPModule).items():
    if not _name.startswith("_") and getattr(FSDPModule, _name) is _theirs:  # added by a later version of torch
        setattr(FSDPModule, _name, refusal(_name, "this version of overlapc does not know the method"))


@contextmanager
def no_sync(module: FSDPModule) -> Iterator[None]:
    """Leave the gradients of forwards within the block unreduced; see `FSDPModule.set_requires_gradient_sync`.

    with overlapc.no_sync(model):
        step(*first).backward()
    step(*last).backward()                    # reduces the gradients of both
    """
    sync = getattr(module, "set_requires_gradient_sync", None)  # torch.compile's wrapper passes it on
    if sync is None:
        raise ConfigError(
            f"no_sync: this {type(module).__name__} was given to neither overlapc.fully_shard nor overlapc.adopt_fsdp2;"
            " pass the outermost module that was"
        )
    sync(False)
    try:
        yield
    finally:
        sync(True)


def groups_of(module: nn.Module) -> tuple[ShardGroup, ...] | None:
    """Return the groups that `fully_shard` made for `module`, one per mesh; None if it was not called on it."""
    return module.__dict__.get("_overlapc_groups")


def manage(module: nn.Module, params: dict[str, ShardedParam]) -> None:
    """Make reads of the parameters of `module` that are named in `params` gather them."""
    if not params:
        return
    module.__dict__["_overlapc_params"] = {**managed(module), **params}
    keys = {name: param.key for name, param in params.items()}
    module.__dict__["_overlapc_keys"] = {**module.__dict__.get("_overlapc_keys", {}), **keys}
    module.__dict__.setdefault("_overlapc_unsynced", {})
    module.__dict__.setdefault("_overlapc_gathered", None)
    _set_class(module, params, group=False)


def make_group(
    module: nn.Module, groups: Sequence[ShardGroup], policy: fsdp2.MixedPrecisionPolicy, part: int = 0
) -> None:
    """Make calls of `module` cast their floating-point inputs and outputs as `policy` says, and count as a forward.

    groups: one for each mesh that parameters of `module` lie on, none if it has no parameters. part: the index of
    `module` among the groups' modules.
    """
    module.__dict__["_overlapc_groups"] = tuple(groups)
    for group in groups:
        group.modules.append(weakref.ref(module))
    module.__dict__["_overlapc_part"] = part
    module.__dict__["_overlapc_policy"] = policy
    module.__dict__["_overlapc_input_dtype"] = policy.param_dtype if policy.cast_forward_inputs else None
    module.__dict__["_overlapc_output_dtype"] = policy.output_dtype
    module.__dict__["_overlapc_pending"] = Pending({})
    module.__dict__["_overlapc_contains_groups"] = False
    _set_class(module, (), group=True)
    _compile_again(module)
    set_fsdp2_state(module, ModuleState(module))


def _compile_again(module: nn.Module) -> None:
    """Compile the call of `module` again if `module.compile()` has compiled that of its class before sharding."""
    compiled = module._compiled_call_impl
    if compiled is None:
        return
    try:
        module._compiled_call_impl = compiled_alike(compiled, module._call_impl)
    except ValueError as error:
        raise ConfigError(
            f"{type(module).__name__}.compile() was called before the module was sharded or adopted ({error})"
            "\nhint: call compile() afterwards"
        ) from None


def name_groups(root: nn.Module) -> None:
    """Set the module paths of every group at or below `root`, and what depends on them."""
    sharded = {path: module for path, module in root.named_modules() if groups_of(module) is not None}
    for path, module in sharded.items():
        for group in groups_of(module) or ():
            group.paths[module.__dict__["_overlapc_part"]] = path
        while path:
            path = path.rpartition(".")[0]
            if path in sharded:
                sharded[path].__dict__["_overlapc_contains_groups"] = True
    for module in root.modules():
        if params := managed(module):
            module.__dict__["_overlapc_forms"] = {name: param.form for name, param in params.items()}


def _set_class(module: nn.Module, names: Iterable[str], group: bool) -> None:
    cls = type(module)
    base: type[nn.Module] = getattr(cls, "_overlapc_base", cls)
    known: frozenset[str] = getattr(cls, "_overlapc_names", frozenset())
    # Classes are hashable; nn.Module's own __hash__ annotation makes mypy doubt it.
    module.__class__ = _subclass(base, known.union(names), group or issubclass(cls, FSDPModule))  # type: ignore[arg-type]


@functools.cache
def _subclass(base: type[nn.Module], names: frozenset[str], group: bool) -> type[nn.Module]:
    bases = (FSDPModule, base) if group else (base,)
    body: dict[str, Any] = {"_overlapc_base": base, "_overlapc_names": names, "__doc__": base.__doc__}
    body["_overlapc_forms"] = {}  # a module has its own
    body.update({name: _property(name) for name in names})
    if issubclass(base, nn.ParameterList):
        body["__getitem__"] = _item
    return type(f"FSDP{base.__name__}", bases, body)


def _property(name: str) -> property:
    def get(self: Any) -> Tensor | None:
        param, form = self._parameters.get(name), self._overlapc_forms.get(name)
        if param is None or form is None:  # it was deleted, or another module has this class, made by `type(module)()`
            found: Tensor | None = self._overlapc_base.__getattr__(self, name)
            return found
        gathered_here = self._overlapc_gathered
        if torch.compiler.is_dynamo_compiling():
            if gathered_here is not None and gathered_here.running:
                read: Tensor = gathered_here.tensors[name]
                return read
            return unshard(param, key_of(self, name, form), _leaf_of(self, name))
        if gathered_here is not None:
            return gathered.read(self, name)
        if gathered.in_forward() or in_backward() or gathered.in_forward_method():  # this module itself was not called
            return _unshard_eagerly(param, self._overlapc_keys[name], _leaf_of(self, name))
        return param

    # Code behind a graph break reads parameters eagerly. Dynamo would compile a graph for the read of each parameter.
    never_compiled_alone(get)
    return property(get)


def _item(self: Any, index: Any) -> Any:
    """Return an item of a ParameterList; of a slice, a list: torch's would make new parameters of gathered ones, which
    get no gradient."""
    if isinstance(index, slice):
        return [self[at] for at in range(*index.indices(len(self)))]
    return self._overlapc_base.__getitem__(self, index)


def _leaf_of(module: Any, name: str) -> Tensor | None:
    """Return the leaf that accumulates unreduced gradients of a parameter; None if it gets no gradient, or has none."""
    wanted = torch.is_grad_enabled() and module._parameters[name].requires_grad
    return module._overlapc_unsynced.get(name) if wanted else None


_unshard_eagerly = torch.compiler.disable(unshard)
never_compiled_alone(FSDPModule._run_forward)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Return `tree` with its floating-point tensors in `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
