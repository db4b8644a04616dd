"""Parameters of a module that are gathered together, outside of compiled graphs, as FSDP2 gathers those of a module.

    a forward within one compiled graph           gathers within the graph, where the compiler hides the collectives
    any other one: eager, or with a graph break   gathers here when it begins, whatever it will read
    unshard() ... reshard()                       gathers here, for calls that run eagerly

A forward that is not one graph may choose by its data what it reads, such as the parameters of some experts, and ranks
have different data. So all ranks gather all parameters when it begins, and reduce all gradients when its backward ends:
a rank that has no gradient of a parameter reduces zeros if another rank has one.

As in FSDP2, a forward frees what it gathered if its group reshards after forward. Autograd may have saved these
tensors: their storages are emptied, and filled again when backward reaches a result of the forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overlapc.errors import OverlapcError
from overlapc.fx.versions.dynamo import never_compiled_alone
from overlapc.fx.versions.sharding import in_backward
from overlapc.parallel.controls import modules_of
from overlapc.parallel.gather import ShardedParam, as_parameter, as_sharded, gather_all, reduce_used, with_due
from overlapc.parallel.gather_stream import GatherStream, gather_stream
from overlapc.parallel.nested import map_tensors
from overlapc.parallel.unreduced import managed

_this_thread = threading.local()
_last: weakref.WeakKeyDictionary[Any, weakref.ref[Gathered]] = weakref.WeakKeyDictionary()  # by module


class Readable:
    """What code reads the gathered parameters of one module from, by name."""

    def __init__(self, gathered: Gathered, tensors: dict[str, Any]) -> None:
        self.gathered = gathered
        self.tensors = tensors
        self.running = False  # whether a forward runs that gathered them; compiled code reads them only then

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: nothing is gathered for a copy of the module."""

    def __reduce__(self) -> Any:
        return type(None), ()


# The functions below run between compiled graphs. Dynamo must compile none of them as a graph of its own.
_never_compiled = torch.compiler.disable(reason="gathers parameters for a forward that is not one graph")


@_never_compiled
def unshard(module: Any) -> None:
    """Gather the parameters of `module`'s groups and keep them; every rank must call this."""
    gathered = _of(module, is_outermost=True)
    gathered.kept = True
    gathered.connect(None)
    gathered.release_after_compute()


def reshard(module: Any) -> None:
    """Free the gathered parameters; a backward that needs them gathers them again."""
    last = _last.get(module)
    gathered = None if last is None else last()
    module.__dict__["_overlapc_running"] = None  # after an exception
    if gathered is not None:
        if not in_backward():
            gathered.forget_backwards()
        gathered.free()


@_never_compiled
def read(owner: Any, name: str) -> Tensor:
    """Return a gathered parameter of `owner`; all of its module are gathered again if its shard has changed."""
    found: Readable = owner._overlapc_gathered
    module = found.gathered.module()
    if not found.running:
        if module is not None and not found.gathered.is_current():
            unshard(module)
            found = owner._overlapc_gathered
        found.gathered.stay()
    tensor: Tensor = found.tensors[name]
    return tensor


def run_gathered(module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return `call(*args, **kwargs)`, a forward of `module` that is not one graph; every rank must call this."""
    forward = begin_forward(module)
    _this_thread.forwards = getattr(_this_thread, "forwards", 0) + 1
    try:
        output = call(*args, **kwargs)
    except BaseException:
        forward.stop()
        forward.gathered.release_after_compute()
        raise
    finally:
        _this_thread.forwards -= 1
    return _ended(forward, output, (args, kwargs))


never_compiled_alone(run_gathered)


@_never_compiled
def begin_forward(module: Any) -> Forward:
    """Gather the parameters of `module`, and make them readable, for a forward that is not one graph."""
    is_outermost = not in_forward() and not in_backward()
    if is_outermost:
        _this_thread.latest, _this_thread.outermost = None, object()
    return Forward(_of(module, is_outermost), module.__dict__.get("_overlapc_running"), module)


def end_forward(module: Any, output: Any) -> Any:
    """End the forward that began last, and return its `output`."""
    return _ended(module.__dict__["_overlapc_running"], output, ())


@_never_compiled
def _ended(forward: Forward, output: Any, inputs: Any) -> Any:
    return forward.ended(output, inputs)


def in_forward() -> bool:
    """Whether a forward that is not one graph runs in this thread."""
    return bool(getattr(_this_thread, "forwards", 0))


def _of(module: Any, is_outermost: bool) -> Gathered:
    """Return what is gathered for `module`, filled if it was empty.

    It is shared with earlier calls within the outermost forward that runs, and with the backward that runs, but not
    with earlier outermost forwards: torch does not know of all changes of a parameter since then (those by `.data`).
    """
    last, outermost = _last.get(module), getattr(_this_thread, "outermost", None)
    found = None if last is None else last()
    if found is None or not found.is_current() or not (found.kept or in_backward() or found.outermost is outermost):
        found = Gathered(module)
        found.outermost = outermost
        _last[module] = weakref.ref(found)
    if is_outermost:
        found.stream.follow_compute()  # an optimizer may have changed the parameters
    found.fill()
    return found


class Gathered:
    """The gathered parameters of one module that was given to `fully_shard`."""

    def __init__(self, module: Any) -> None:
        """Describe them; `fill` gathers them."""
        self.module = weakref.ref(module)
        self.kept = False  # whether `unshard` asked for them, so that a forward without gradients leaves them
        self.outermost: object = None  # identifies the outermost forward that they were gathered in
        self._reads = list(_reads(module))
        self._full: dict[str, _Full] = {}  # by parameter key, which tied parameters share
        for _, _, sharded, param in self._reads:
            self._full.setdefault(sharded.key, _Full(param, sharded))
        self._readable: list[tuple[Any, Readable]] = []  # with the owner of each
        self._in_backward: set[Forward] = set()
        self._must_stay = False  # whether a backward may need them without passing a result of a forward
        device = next((full.shard.device for full in self._full.values()), None)
        self.stream = gather_stream(device or _device_of(module))
        self._ready: torch.cuda.Event | None = None  # the end of a gather that compute has not waited for

    def is_current(self) -> bool:
        """Whether no shard has changed since, as far as torch knows, and none was replaced."""
        return all(
            managed(owner).get(name) is sharded and self._full[sharded.key].is_of(owner._parameters.get(name))
            for owner, name, sharded, _ in self._reads
        )

    def holds_any(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of `tensors` is a view of a gathered parameter."""
        storages = {full.tensor.untyped_storage().data_ptr() for full in self._full.values() if full.tensor is not None}
        return any(_local(tensor).untyped_storage().data_ptr() in storages for tensor in tensors)

    def connect(self, forward: Forward | None) -> int:
        """Make the parameters readable, as results of new autograd nodes; return the number of nodes.

        forward: notified when a node has run.
        """
        groups: dict[int, list[_Full]] = {}
        for full in self._full.values():
            groups.setdefault(id(full.sharded.group), []).append(full)
        leaves = self._leaves()
        nodes, tensors = 0, {}
        for fulls in groups.values():
            connected = _connected(self.stream, fulls, [leaves.get(full.sharded.key) for full in fulls], forward)
            nodes += any(tensor.requires_grad for tensor in connected)
            tensors.update({full.sharded.key: tensor for full, tensor in zip(fulls, connected, strict=True)})
        by_owner: dict[int, tuple[Any, Readable]] = {}
        for owner, name, sharded, _ in self._reads:
            _, readable = by_owner.setdefault(id(owner), (owner, Readable(self, {})))
            readable.tensors[name] = as_parameter(tensors[sharded.key], sharded)
        self._readable = list(by_owner.values())
        self.show(running=forward is not None)
        return nodes

    def prefetch(self) -> None:
        """Gather those that are not gathered, or whose memory was freed, beside compute."""
        for full in self._full.values():
            full.freed_after = None
        missing = [full for full in self._full.values() if full.is_empty]

        def gather() -> None:
            found = gather_all([full.shard for full in missing], [full.sharded for full in missing])
            for full, gathered in zip(missing, found, strict=True):
                full.fill(gathered)

        if missing:
            self._ready = self.stream.run(gather)

    def fill(self) -> None:
        """Like `prefetch`, but later compute waits for it."""
        self.prefetch()
        if self._ready is not None:
            self._ready.wait()
            self._ready = None

    def release_after_compute(self) -> None:
        """Let the allocator reuse the memory once no tensor refers to it and the compute issued by then has ended."""
        self.stream.release_after_compute(full.tensor for full in self._full.values() if full.tensor is not None)

    def _leaves(self) -> dict[str, Tensor]:
        """Return the leaves where unreduced gradients accumulate, by parameter key."""
        if not torch.is_grad_enabled():
            return {}
        found = ((sharded.key, owner._overlapc_unsynced.get(name)) for owner, name, sharded, _ in self._reads)
        return {key: leaf for key, leaf in found if leaf is not None and self._full[key].param.requires_grad}

    def show(self, running: bool) -> None:
        """Let code read the parameters. running: compiled code, too, because a forward or its backward runs."""
        for owner, readable in self._readable:
            readable.running = running
            owner.__dict__["_overlapc_gathered"] = readable

    def rest(self) -> None:
        """Show or hide the parameters after a forward."""
        if self._in_backward or self.kept:
            self.show(running=bool(self._in_backward))
            return
        for owner, readable in self._readable:
            if owner.__dict__["_overlapc_gathered"] is readable:
                owner.__dict__["_overlapc_gathered"] = None

    def free(self) -> None:
        """Free the memory until a later forward, or a backward that reaches a result of an earlier one."""
        self.kept = False
        self.rest()
        if not self._must_stay:
            self.stream.free(self._full.values())

    def stay(self) -> None:
        """Keep the memory: a backward may need it without passing a result of a forward."""
        self._must_stay = True
        self.release_after_compute()

    @property
    def can_be_filled(self) -> bool:
        """Whether all values are there, or can be gathered again."""
        return all(not full.is_empty or full.is_of(full.param) for full in self._full.values())

    def begin_backward(self, forward: Forward) -> None:
        """Fill the storages again for the backward of `forward`."""
        if not self._in_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backwards)
        self._in_backward.add(forward)
        if torch.is_grad_enabled():  # create_graph=True
            self.stay()
        for full in self._full.values():
            if full.is_empty and not full.is_of(full.param):
                raise OverlapcError(
                    f"{full.sharded.label.param} was changed between forward and backward, which needs its old values\n"
                    "hint: call backward before the optimizer's step"
                )
        self.fill()
        self.show(running=True)
        before = None if forward.before is None else forward.before()
        if before is not None and before.gathered.can_be_filled:
            before.gathered.prefetch()  # its backward comes next

    def end_backward(self, forward: Forward) -> None:
        """Free the memory unless another backward needs it."""
        self._in_backward.discard(forward)
        module = self.module()
        if self._in_backward or module is None:
            return
        if module.__dict__.get("_overlapc_reshard_after_backward", True):
            self.free()
        else:
            self.rest()

    def forget_backwards(self) -> None:
        """Note that no backward runs: one that an exception ended did not say so."""
        self._in_backward.clear()

    def _end_backwards(self) -> None:
        """End those of forwards without trainable parameters, or whose parameters got no gradient."""
        for forward in list(self._in_backward):
            self.end_backward(forward)


class Forward:
    """A forward of a sharded module that is not one graph, and its backward."""

    def __init__(self, gathered: Gathered, outer: Forward | None, module: Any) -> None:
        """Begin it. outer: the forward of the same module that calls this one."""
        self.gathered = gathered
        self.before: weakref.ref[Forward] | None = getattr(_this_thread, "latest", None)
        _this_thread.latest = weakref.ref(self)
        self._outer = outer
        self._module = module
        if not in_backward():
            gathered.forget_backwards()
        self._nodes = self._left = gathered.connect(self)
        module.__dict__["_overlapc_running"] = self

    def stop(self) -> None:
        """End the forward, by an exception if `ended` is not called."""
        self._module.__dict__["_overlapc_running"] = self._outer
        if self._outer is None:
            self.gathered.rest()

    def ended(self, output: Any, inputs: Any) -> Any:
        """End the forward and return its `output`."""
        gathered = self.gathered
        self.stop()
        output = self._module._reduce_pending(output)
        results = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        for result in results:
            result.register_hook(self._reached)
        if (self._nodes and not results) or gathered.holds_any(results):
            gathered.stay()
        if results and not self._nodes:
            wanted = [tensor for tensor in _tensors(inputs) if tensor.requires_grad]
            if wanted:
                torch.autograd.graph.register_multi_grad_hook(wanted, lambda grads: gathered.end_backward(self))
        if self._outer is not None or in_backward():
            return output
        if not any(group.reshard for group in self._module._overlapc_groups):
            gathered.release_after_compute()
            return output
        if results or self._nodes:
            gathered.free()
        else:  # autograd has saved nothing
            gathered.kept = False
            gathered.rest()
            gathered.release_after_compute()
        return output

    def _reached(self, grad: Tensor) -> None:
        self.gathered.begin_backward(self)

    def node_ended(self) -> None:
        """Note that one of its autograd nodes has run; the backward ends with the last one."""
        self._left -= 1
        if not self._left:
            self._left = self._nodes
            self.gathered.end_backward(self)


class _Full:
    """One gathered parameter."""

    def __init__(self, param: DTensor, sharded: ShardedParam) -> None:
        self.param = param
        self.sharded = sharded
        self.shard = param.to_local().detach()
        self._version = _version(param)
        self._bytes = 0
        self.tensor: Tensor | None = None
        self.freed_after: object = None

    def is_of(self, param: Any) -> bool:
        """Whether it was gathered from `param`, whose shard has not changed since, as far as torch knows."""
        return isinstance(param, DTensor) and self._version == _version(param)

    def fill(self, gathered: Tensor) -> None:
        """Take the gathered values, into the emptied storage if there is one."""
        if self.tensor is None:
            self.tensor, self._bytes = gathered, gathered.untyped_storage().nbytes()
            return
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.tensor):
            self.tensor.untyped_storage().resize_(self._bytes)
            self.tensor.copy_(gathered)

    def empty(self) -> None:
        """Free the storage, unless it is the shard's."""
        assert self.tensor is not None
        storage = self.tensor.untyped_storage()
        if storage.data_ptr() != self.shard.untyped_storage().data_ptr():
            storage.resize_(0)

    @property
    def is_empty(self) -> bool:
        """Whether it is not gathered, or its storage was emptied."""
        return self.tensor is None or self.tensor.untyped_storage().nbytes() < self._bytes


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _version(param: DTensor) -> tuple[int, int, int]:
    """Return what differs after most changes of a parameter; optimizers that take DTensors count theirs there only."""
    shard = param.to_local()
    return shard.data_ptr(), shard._version, param._version


def _reads(module: Any) -> Iterator[tuple[Any, str, ShardedParam, DTensor]]:
    """Yield (owner, name, description, sharded parameter) of the parameters of `module`'s groups."""
    for owner in modules_of(module, recurse=False):
        for name, sharded in managed(owner).items():
            param = owner._parameters.get(name)
            if isinstance(param, DTensor):
                yield owner, name, sharded, param


def _connected(
    stream: GatherStream, fulls: Sequence[_Full], leaves: Sequence[Tensor | None], forward: Forward | None
) -> tuple[Tensor, ...]:
    """Return the gathered parameters of one group as results of an autograd node that reduces their gradients.

    leaves: those where gradients accumulate unreduced, or None for parameters whose gradients are reduced.
    """
    # The DTensors themselves: before torch 2.13 the gradient of `to_local` is zeros where there should be none.
    params = [full.param if leaf is None else None for full, leaf in zip(fulls, leaves, strict=True)]
    with stream.for_reductions():
        shards = _Shards.apply(fulls, *params)
    connected: tuple[Tensor, ...] = _Connected.apply(stream, fulls, forward, len(fulls), *shards, *leaves)
    return connected


class _Shards(torch.autograd.Function):
    """Takes the reduced gradients to the parameters.

    A node's backward runs on the stream of its forward, here that of reductions. So autograd lets whatever it runs
    next with a gradient, on this stream or another one, wait for the reduction; compute does not wait for it here.
    """

    @staticmethod
    def forward(ctx: Any, fulls: Sequence[_Full], *params: DTensor | None) -> Any:
        ctx.fulls = fulls
        ctx.set_materialize_grads(False)
        results = [full.shard.detach() for full in fulls]
        frozen = [at for at, param in enumerate(params) if param is None or not param.requires_grad]
        ctx.mark_non_differentiable(*(results[at] for at in frozen))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor | None) -> Any:
        pairs = zip(ctx.fulls, parts, strict=True)
        return None, *(None if part is None else as_sharded(part, full.param) for full, part in pairs)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: GatherStream,
        fulls: Sequence[_Full],
        forward: Forward | None,
        count: int,
        *tensors: Tensor | None,
    ) -> Any:
        ctx.stream, ctx.fulls, ctx.forward = stream, fulls, forward
        ctx.leaf_dtypes = [None if leaf is None else leaf.dtype for leaf in tensors[count:]]
        ctx.set_materialize_grads(False)
        results = tuple(full.tensor.detach() for full in fulls if full.tensor is not None)
        wanted = [tensor is not None and tensor.requires_grad for tensor in tensors]
        frozen = [at for at in range(count) if not wanted[at] and not wanted[count + at]]
        ctx.mark_non_differentiable(*(results[at] for at in frozen))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        fulls, needed = ctx.fulls, ctx.needs_input_grad[4:]
        of_shards: list[Tensor | None] = [None] * len(fulls)
        of_leaves: list[Tensor | None] = [None] * len(fulls)
        reduced = [at for at in range(len(fulls)) if needed[at]]
        for at, dtype in enumerate(ctx.leaf_dtypes):
            grad = grads[at]
            if dtype is not None and grad is not None:
                of_leaves[at] = grad.to(dtype)
        if reduced:
            given = [with_due(grads[at], fulls[at].sharded.key) for at in reduced]
            described = [fulls[at].sharded for at in reduced], [fulls[at].shard for at in reduced]
            parts = ctx.stream.reduce(lambda: reduce_used(given, *described), given)
            for at, part in zip(reduced, parts, strict=True):
                of_shards[at] = part
        if ctx.forward is not None:
            ctx.forward.node_ended()
        return None, None, None, None, *of_shards, *of_leaves


def _device_of(module: Any) -> torch.device:
    """Return the device of the parameters inside of `module`, which has none of its own."""
    return next((param.device for param in module.parameters()), torch.device("cpu"))


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found
