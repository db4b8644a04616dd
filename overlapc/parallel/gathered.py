"""Parameters of a module that are gathered together, outside of compiled graphs, as FSDP2 gathers those of a module.

    a forward within one compiled graph           gathers within the graph, where the compiler hides the collectives
    any other one: eager, or with a graph break   gathers here when it begins, whatever it will read
    unshard() ... reshard()                       gathers here, for calls that run eagerly

A forward that is not one graph may choose by its data what it reads, such as the parameters of some experts, and ranks
have different data. So all ranks gather all parameters when it begins, and reduce all gradients when its backward ends:
a rank that has no gradient of a parameter reduces zeros if another rank has one.

As in FSDP2, the gathered form of a parameter has one memory for as long as the module lives (`full.py`). A forward that
reshards frees it when it ends, although autograd may have saved it; backward fills it again when it reaches a result of
the forward, and frees it when it reaches the forward's arguments, or at its end.

Whether a rank communicates here depends on the calls that its program makes, and never on Python's garbage collector.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from overlapc.errors import OverlapcError
from overlapc.fx.captured.wrapped import storage_of
from overlapc.fx.versions.dynamo import never_compiled_alone
from overlapc.fx.versions.sharding import FORWARD_METHODS_FILE, in_backward
from overlapc.parallel.controls import modules_of, parts_of
from overlapc.parallel.full import Full, connected, reduce_without_gradients
from overlapc.parallel.gather import ShardedParam, as_dtensor, as_parameter, gather_all
from overlapc.parallel.gather_stream import gather_stream
from overlapc.parallel.nested import map_tensors, tensors_in
from overlapc.parallel.unreduced import managed
from overlapc.parallel.writes import lost
from overlapc.runtime.optimizer_memory import plain_tensors

_this_thread = threading.local()
_ending: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()  # by autograd's graph task


class _NotCopied:
    """Not part of a copy of the module that has it, nor of a pickle."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class Readable(_NotCopied):
    """What code reads the gathered parameters of one module from, by name."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered = gathered
        self.tensors: dict[str, Any] = {}
        self.running = False  # whether a forward or its backward runs; compiled code reads them only then


# The functions below run between compiled graphs. Dynamo must compile none of them as a graph of its own.
_never_compiled = torch.compiler.disable(reason="gathers parameters for a forward that is not one graph")


@_never_compiled
def unshard(module: Any) -> None:
    """Gather the parameters of `module`'s groups and keep them; every rank must call this."""
    gathered = _of(module)
    gathered.kept = True
    gathered.begin(_begins_outermost())


@_never_compiled
def reshard(module: Any) -> None:
    """Free the gathered parameters; a backward that needs them gathers them again."""
    gathered = _known(module)
    if gathered is not None:
        if not in_backward():
            gathered.forget_backwards()
        gathered.rest(free=True)


@_never_compiled
def read(owner: Any, name: str) -> Tensor:
    """Return a gathered parameter of `owner`; all of its module are gathered again if its shard has changed."""
    found: Readable = owner._overlapc_gathered
    if not found.running:  # `unshard` gathered it
        if not found.gathered.has_current(owner, name):
            found.gathered.begin(_begins_outermost())
        found.gathered.stay()
    tensor: Tensor = owner._overlapc_gathered.tensors[name]
    return tensor


def run_gathered(module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return `call(*args, **kwargs)`, a forward of `module` that is not one graph; every rank must call this."""
    forward = begin_forward(module)
    try:
        args, kwargs = _watch(forward, args, kwargs)
        return _ended(forward, call(*args, **kwargs))
    except BaseException:
        _stopped(forward)
        raise


never_compiled_alone(run_gathered)


@_never_compiled
def begin_forward(module: Any) -> Forward:
    """Gather the parameters of `module` and make them readable."""
    begins_outermost, outermost = _begins_outermost(), _outermost()
    if begins_outermost or outermost is None:
        outermost = _this_thread.outermost = Outermost()
    gathered = _of(module)
    gathered.begin(begins_outermost, outermost)
    return Forward(gathered, module, outermost)


class Method:
    """A call of a method that counts as a forward; dropped by its caller, it ends what an exception left."""

    @_never_compiled
    def __init__(self, module: Any) -> None:
        """Gather the parameters of `module` and make them readable."""
        self._forward: Forward | None = begin_forward(module)

    @_never_compiled
    def watched(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments as the method should get them."""
        assert self._forward is not None
        return self._forward.watch(args, kwargs)

    @_never_compiled
    def ended(self, output: Any) -> Any:
        """Return the method's `output`."""
        assert self._forward is not None
        output = self._forward.ended(output)
        self._forward = None
        return output

    def __del__(self) -> None:
        if self._forward is not None:
            self._forward.stopped()


@_never_compiled
def _watch(forward: Forward, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return forward.watch(args, kwargs)


@_never_compiled
def _ended(forward: Forward, output: Any) -> Any:
    return forward.ended(output)


@_never_compiled
def _stopped(forward: Forward) -> None:
    forward.stopped()


def in_forward() -> bool:
    """Whether a forward that is not one graph runs in this thread."""
    outermost = _outermost()
    return outermost is not None and bool(outermost.running)


def _outermost() -> Outermost | None:
    found: Outermost | None = getattr(_this_thread, "outermost", None)
    return found


def in_forward_method() -> bool:
    """Whether a method given to `register_fsdp_forward_method` led here."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == FORWARD_METHODS_FILE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _begins_outermost() -> bool:
    return not in_forward() and not in_backward()


def _of(module: Any) -> Gathered:
    """Return what is gathered for `module`, which all modules that one `fully_shard` call got share."""
    known = _known(module)
    if known is None:
        known = parts_of(module)[0].__dict__["_overlapc_all_gathered"] = Gathered(module)
    return known


def _known(module: Any) -> Gathered | None:
    found: Gathered | None = parts_of(module)[0].__dict__.get("_overlapc_all_gathered")
    return found


class Gathered(_NotCopied):
    """The gathered parameters of the modules that one `fully_shard` call got."""

    def __init__(self, module: Any) -> None:
        """Describe those of `module` and its group; `begin` gathers them."""
        self.kept = False  # whether `unshard` asked for them: they stay until a forward that reshards them ends
        self._module = weakref.ref(module)
        self.followed_by: Gathered | None = None  # whose forward came next, when one of these ran last
        self._outermost: Outermost | None = None  # the outermost forward in which they were gathered
        self._full: dict[str, Full] = {}  # by parameter key, which tied parameters share
        self._readable: list[tuple[Any, Readable, dict[str, str]]] = []  # (owner, what it reads, key of each name)
        self._tensors: dict[str, Any] = {}  # what code reads, by parameter key, unless they are hidden
        self._leaves: dict[str, Tensor] = {}  # where unreduced gradients of these accumulate
        self._reductions: list[tuple[Node, list[Full]]] = []  # nodes that reduce gradients, and those of what
        self._replaced: list[Full] = []  # of parameters that were replaced since the forward whose backward runs
        self._forwards: set[Forward] = set()  # those that run
        self._backwards: set[Forward] = set()  # those whose backward runs
        self._parts_before: set[Any] = set()  # modules of the group whose forward is still to come
        self._behind: set[Forward] = set()  # of the last outermost forward, those whose backward is still to come
        self._must_stay = False  # whether a backward may need them without passing a result of a forward
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        self.stream = gather_stream(device)
        self._ready: torch.cuda.Event | None = None  # the end of a gather that compute has not waited for

    def begin(self, begins_outermost: bool, outermost: Outermost | None = None) -> None:
        """Gather what is not gathered or has changed, and let the code that runs now read it.

        outermost: that of a forward that begins. It also gathers again what an earlier outermost forward gathered,
        because torch does not know of all changes since then (those by `.data`).
        """
        anew = outermost is not None
        if begins_outermost:
            self._forwards.clear()
            self.forget_backwards()
            self.stream.follow_compute()  # an optimizer may have changed the parameters
        if not (anew or self._forwards or self._backwards):
            self._tensors = {}  # parameters may have been frozen since, or their gradients kept unreduced
        with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
            self._follow_modules()
            if outermost is not None and not in_backward():
                self._enter(outermost)
            self.fill()
            if not self._tensors:
                self._connect()
        self.show(running=anew or bool(self._forwards or self._backwards))

    def _enter(self, outermost: Outermost) -> None:
        """Let everything be gathered again that an earlier outermost forward gathered."""
        if self._outermost is outermost:
            return
        self._outermost = outermost
        self._parts_before, self._behind = set(self._parts()), set()
        self._tensors = {}
        if not self.kept:
            self._must_stay = False
            for full in self._full.values():
                full.is_current = False

    def has_current(self, owner: Any, name: str) -> bool:
        """Whether what code reads is a parameter's present form, as far as torch knows."""
        key, param = managed(owner)[name].key, owner._parameters[name]
        full = self._full.get(key)
        return (
            full is not None
            and full.is_for(param)
            and full.is_current
            and not full.has_changed()
            and self._tensors[key].requires_grad == param.requires_grad
            and self._leaves.get(key) is (owner._overlapc_unsynced.get(name) if param.requires_grad else None)
        )

    def _parts(self) -> list[Any]:
        module = self._module()
        return [] if module is None else parts_of(module)

    def _follow_modules(self) -> None:
        """Take the parameters that the modules have now."""
        found: dict[str, Full] = {}
        by_owner: dict[Any, dict[str, str]] = {}
        for owner, name, sharded, param in _reads(self._module()):
            known = found.get(sharded.key) or self._full.get(sharded.key)
            found[sharded.key] = known if known is not None and known.is_for(param) else Full(param, sharded)
            by_owner.setdefault(owner, {})[name] = sharded.key
        if found != self._full:
            self._full, self._tensors = found, {}
            self._readable = [(owner, Readable(self), keys) for owner, keys in by_owner.items()]

    def _connect(self) -> None:
        """Make what code reads: results of new autograd nodes, also for a forward that may enable gradients later."""
        leaves = self._leaves = self._unsynced()
        self._reductions = []
        with torch.enable_grad():
            for fulls in self._by_group():
                results = connected(self.stream, fulls, [leaves.get(full.sharded.key) for full in fulls])
                for full, result in zip(fulls, results, strict=True):
                    self._tensors[full.sharded.key] = as_parameter(result, full.sharded)
                node = next((result.grad_fn for result in results if result.grad_fn is not None), None)
                reduced = [full for full in fulls if full.param.requires_grad and full.sharded.key not in leaves]
                if node is not None and reduced:
                    self._reductions.append((node, reduced))

    def _unsynced(self) -> dict[str, Tensor]:
        """Return the leaves where unreduced gradients accumulate, by parameter key."""
        found: dict[str, Tensor] = {}
        for owner, _, keys in self._readable:
            for name, leaf in owner.__dict__["_overlapc_unsynced"].items():
                if name in keys and owner._parameters[name].requires_grad:
                    found[keys[name]] = leaf
        return found

    def _by_group(self) -> list[list[Full]]:
        found: dict[int, list[Full]] = {}
        for full in self._full.values():
            found.setdefault(id(full.sharded.group), []).append(full)
        return list(found.values())

    def prefetch(self, wanted: dict[str, Full] | None = None) -> None:
        """Gather those that are not gathered or have changed, beside compute. wanted: others than the present ones."""
        missing = []
        for full in (self._full if wanted is None else wanted).values():
            full.freed_after = None
            if not full.is_current or full.has_changed():
                missing.append(full)

        def gather() -> None:
            memory = [full.memory() for full in missing]
            found = gather_all([full.shard for full in missing], [full.sharded for full in missing], memory)
            for full, gathered in zip(missing, found, strict=True):
                full.fill(gathered)

        # An optimizer may have run since the forward, which would have followed compute at its outermost begin.
        if in_backward() and any(full.has_changed() for full in missing):
            self.stream.follow_compute()
        if missing:
            with temporarily_clear_interpreter_stack(), torch.no_grad(), torch.inference_mode(False):
                self._ready = self.stream.run(gather)

    def prefetch_forward(self, outermost: Outermost) -> bool:
        """Gather for a forward that probably comes next, unless an earlier one still needs the memory as it is."""
        if self.kept or self._must_stay or self._forwards or self._backwards:
            return False
        self._enter(outermost)
        self.prefetch()
        return True

    def fill(self, wanted: dict[str, Full] | None = None) -> None:
        """Like `prefetch`, but later compute waits for it."""
        self.prefetch(wanted)
        if self._ready is not None:
            self._ready.wait()
            self._ready = None

    def show(self, running: bool) -> None:
        """Let code read the parameters. running: compiled code, too, because a forward or its backward runs."""
        for owner, readable, keys in self._readable:
            readable.running = running
            readable.tensors = {name: self._tensors[key] for name, key in keys.items()}
            owner.__dict__["_overlapc_gathered"] = readable

    def rest(self, free: bool) -> None:
        """Hide the parameters, unless a call that runs needs them. free: free their memory, too."""
        if self._forwards or self._backwards:
            self.show(running=True)
            return
        if free:
            self.kept = False
            if not self._must_stay:
                self.stream.free([*self._full.values(), *self._replaced])
                self._replaced = []
        if self.kept:
            self.show(running=False)
            return
        self._tensors, self._reductions = {}, []
        for owner, readable, _ in self._readable:
            readable.tensors = {}
            owner.__dict__["_overlapc_gathered"] = None

    def stay(self) -> None:
        """Keep the memory until the next forward: a backward may need it without passing a result of a forward."""
        self._must_stay = True

    def holds_any(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of `tensors` is a view of a gathered parameter."""
        mine = {storage_of(full.local).data_ptr() for full in self._full.values() if full.local is not None}
        return any(storage_of(tensor).data_ptr() in mine for tensor in plain_tensors(tensors))

    def begin_forward(self, forward: Forward) -> None:
        """Note that `forward` begins, and let it know what it needs later."""
        self._forwards.add(forward)
        forward.tensors, forward.reductions, forward.siblings = self._tensors, self._reductions, self._behind
        forward.full, forward.versions = self._full, self._versions()

    def end_forward(self, forward: Forward) -> None:
        """Raise OverlapcError if `forward` changed a parameter; note that it has ended."""
        for full, before, after in zip(self._full.values(), forward.versions, self._versions(), strict=False):
            if before != after:
                full.is_current = False
                raise OverlapcError(f"a forward writes into {lost(full.sharded)}")
        self._forwards.discard(forward)

    def stop_forward(self, forward: Forward) -> None:
        """Note that `forward` was ended by an exception, and free the memory."""
        self._forwards.discard(forward)
        self.rest(free=not in_backward())

    def _versions(self) -> list[int]:
        return [full.local._version for full in self._full.values() if full.local is not None]

    def after_forward(self, forward: Forward, has_graph: bool) -> None:
        """Free the memory after a forward, unless the group keeps it for backward or for its other modules."""
        self._parts_before.discard(forward.module)
        if has_graph:
            forward.siblings.add(forward)
        if in_backward():
            backward_that_runs().touched[self] = None  # a repeated forward
            return
        reshards = any(group.reshard for group in forward.module._overlapc_groups)
        self.rest(free=not self._parts_before and (reshards or not (has_graph or self.kept)))

    def begin_backward(self, forward: Forward) -> None:
        """Fill the memory again for the backward of `forward`."""
        backward_that_runs().touched[self] = None
        self._backwards.add(forward)
        if torch.is_grad_enabled():  # create_graph=True
            self.stay()
        self.fill(forward.full)
        if forward.full is not self._full:
            self._replaced += forward.full.values()
        self._tensors = forward.tensors
        self.show(running=True)

    def end_backward(self, forward: Forward) -> None:
        """Free the memory, unless the backward of an earlier forward of the group, which needs it, comes next."""
        if forward not in self._backwards:
            return
        self._backwards.discard(forward)
        forward.siblings.discard(forward)
        if all(sibling.reductions is not forward.reductions for sibling in forward.siblings):
            self._reduce_without_gradients(forward)
        if not forward.siblings:
            self._free_after_backward()

    def end_backwards(self) -> None:
        """End those that autograd did not lead to the arguments of their forward."""
        ended, self._backwards = self._backwards, set()
        for forward in ended:
            forward.siblings.clear()
        for forward in {id(forward.reductions): forward for forward in ended}.values():
            self._reduce_without_gradients(forward)
        self._free_after_backward()

    def _free_after_backward(self) -> None:
        module = self._module()
        self.rest(free=module is None or module.__dict__.get("_overlapc_reshard_after_backward", True))

    def _reduce_without_gradients(self, forward: Forward) -> None:
        """Reduce like other ranks what has no gradient on this one in the backward that runs."""
        for node, fulls in forward.reductions:
            if not torch._C._will_engine_execute_node(node):
                reduce_without_gradients(self.stream, fulls)

    def forget_backwards(self) -> None:
        """Note that none runs: one that an exception ended did not always say so."""
        self._backwards.clear()


class Outermost:
    """A forward that no other one called, and those within it."""

    def __init__(self) -> None:
        self.running: set[Forward] = set()
        self._latest: _Place | None = None
        self._prefetched: Gathered | None = None

    def begin(self, forward: Forward) -> _Place:
        """Return the place of `forward`, which begins; gather for the one that followed it last time."""
        self.running.add(forward)
        gathered = forward.gathered
        if in_backward():
            return _Place(gathered, None)
        if self._latest is not None:
            self._latest.gathered.followed_by = gathered
        self._latest = _Place(gathered, self._latest)
        if self._prefetched is not None and self._prefetched is not gathered:
            self._prefetched.rest(free=True)
        following = gathered.followed_by
        self._prefetched = following if following is not None and following.prefetch_forward(self) else None
        return self._latest

    def end(self, forward: Forward) -> None:
        """Note that `forward` has ended; free what was gathered for one that did not come."""
        self.running.discard(forward)
        if self.running:
            return
        if self._prefetched is not None and self._latest is not None:
            self._prefetched.rest(free=True)
            self._latest.gathered.followed_by = None
        self._prefetched = self._latest = None


@dataclass
class _Place:
    """The place of a forward in the order of an outermost one."""

    gathered: Gathered
    before: _Place | None
    has_graph: bool = False

    def prefetch_before(self) -> None:
        """Gather for the backward that comes next."""
        before = self.before
        while before is not None and not before.has_graph:
            before = before.before
        if before is not None:
            before.gathered.prefetch()
            backward_that_runs().touched[before.gathered] = None


class Forward(_NotCopied):
    """A forward of a sharded module that is not one graph, and its backward."""

    full: dict[str, Full]  # the parameters that it found, by key
    tensors: dict[str, Any]  # what it reads of them
    reductions: list[tuple[Node, list[Full]]]  # the nodes that reduce its gradients, and those of what
    siblings: set[Forward]  # of the same group and outermost forward, those whose backward is still to come
    versions: list[int]  # of the parameters at its begin

    def __init__(self, gathered: Gathered, module: Any, outermost: Outermost) -> None:
        """Begin it."""
        self.gathered = gathered
        self.module = module
        self._outermost = outermost
        self._watched: list[Tensor] = []  # while it runs: arguments that have a gradient, which may also be results
        gathered.begin_forward(self)
        self._place = self._outermost.begin(self)

    def watch(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments; backward ends where it has the gradients of those that have one.

        Tensors among the arguments are replaced by views of them, so that nothing before this module has to run first.
        """
        if torch.is_inference_mode_enabled():
            return args, kwargs

        def view(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            with torch.enable_grad():
                self._watched.append(tensor.view_as(tensor))
            return self._watched[-1]

        # Containers are made anew, as FSDP2 does, but only for tensors in them that have a gradient.
        if any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            args, kwargs = map_tensors(view, (args, kwargs))
        if self._watched:
            torch.autograd.graph.register_multi_grad_hook(self._watched, lambda _: self.gathered.end_backward(self))
        return args, kwargs

    def stopped(self) -> None:
        """End the forward after an exception."""
        self._watched = []
        self.gathered.stop_forward(self)
        self._outermost.end(self)

    def ended(self, output: Any) -> Any:
        """End the forward and return its `output`."""
        gathered = self.gathered
        gathered.end_forward(self)
        tensors = tensors_in(output)
        passed, self._watched = {id(tensor) for tensor in self._watched}, []
        results = [each for each in tensors if each.requires_grad and not each.is_leaf and id(each) not in passed]
        for result in results:
            result.register_hook(self._reached)
            base = result._base if result._is_view() else None
            if base is not None and base.requires_grad and not base.is_leaf:
                base.register_hook(self._reached)  # a view that the caller changes in place forgets its own hooks
        if gathered.holds_any(tensors) or (not results and torch.is_grad_enabled()):
            gathered.stay()
        self._place.has_graph = bool(results)
        gathered.after_forward(self, has_graph=bool(results))
        self._outermost.end(self)
        return self.module._reduce_pending(output)

    def _reached(self, grad: Tensor) -> None:
        self.gathered.begin_backward(self)
        self._place.prefetch_before()


class _Backward:
    """A backward of autograd, which calls this at its end, or drops it if an exception ends the backward."""

    def __init__(self) -> None:
        self.touched: dict[Gathered, None] = {}

    def __call__(self) -> None:
        """End what has not ended, in the order of the modules' backwards, and let compute wait for all reductions."""
        touched, self.touched = self.touched, {}
        for gathered in reversed(touched):
            gathered.end_backwards()
        for gathered in touched:
            gathered.stream.end_reduction()
            gathered.stream.empty_freed()

    def __del__(self) -> None:
        for gathered in self.touched:
            gathered.forget_backwards()
            gathered.rest(free=True)


def backward_that_runs() -> _Backward:
    """Return the backward that runs."""
    task = torch._C._current_graph_task_id()
    found = _ending.get(task)
    if found is None:
        found = _ending[task] = _Backward()
        torch.autograd.Variable._execution_engine.queue_callback(found)
    return found


def _reads(module: Any) -> Iterator[tuple[Any, str, ShardedParam, DTensor]]:
    """Yield (owner, name, description, sharded parameter) of the parameters of `module`'s groups."""
    for owner in () if module is None else modules_of(module, recurse=False):
        for name, sharded in managed(owner).items():
            param = owner._parameters.get(name)
            if param is not None:
                yield owner, name, sharded, as_dtensor(param, sharded)
