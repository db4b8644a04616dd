"""FSDP2's other methods of a sharded module: some change the graph, some do nothing, some raise ConfigError.

Options that change the traced graph give parameters new keys. Dynamo guards on keys, so the next call recompiles;
setting such an option before the first call costs nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from overlapc.errors import ConfigError
from overlapc.parallel.gather import ShardedParam
from overlapc.parallel.unreduced import managed

_log = logging.getLogger("overlapc")

# These control when FSDP2 communicates. The compiler decides that here, so a call is logged and does nothing.
HINTS = (
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_unshard_in_backward",
    "set_is_last_backward",
    "set_separate_reduce_scatter_group",
    "set_reduce_scatter_max_input_buffers",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
    "set_requires_all_reduce",  # every micro-batch is reduced over replicas, too, which gives the same sum
)
# Methods whose effect cannot be expressed in a graph -> what to do instead.
REFUSED = {
    "set_custom_all_gather": "remove the call: overlapc issues its own all-gathers, which its passes can move",
    "set_custom_reduce_scatter": "remove the call: overlapc issues its own reduce-scatters, which its passes can move",
    "set_all_reduce_hook": "change gradients between backward and the optimizer's step",
    "set_force_sum_reduction_for_comms": "call set_gradient_divide_factor(number of ranks), which reduces by sums",
    "set_reduce_scatter_unused_params": "remove the call: parameters that no rank used are not reduced",
}


class Controls:
    """Mixin for `FSDPModule`. `recurse`: also change all sharded modules inside this one."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether backward gathers parameters again (True) or forward keeps them for it, as in `fully_shard`.

        Raises ConfigError while gradients wait to be reduced.
        """
        changed = modules_of(self, recurse)
        groups = [group for module in changed for group in module.__dict__.get("_overlapc_groups", ())]
        if all(group.reshard_after_forward is reshard_after_forward for group in groups):
            return
        _refuse_unreduced("set_reshard_after_forward", changed)
        _keep(changed)
        for group in groups:
            group.reshard_after_forward, group.post = reshard_after_forward, None
        _describe_anew(changed, lambda param: param)

    def set_gradient_divide_factor(self, factor: float, recurse: bool = False) -> None:
        """Divide summed gradients by `factor` in place of the number of data-parallel ranks.

        For this module's group only, like FSDP2's, unless `recurse`. Raises ConfigError for a factor that is not
        positive, and while gradients wait to be reduced.
        """
        if not factor > 0:
            raise ConfigError(f"set_gradient_divide_factor: {factor} is not a positive number")
        changed = modules_of(self, recurse)
        _refuse_unreduced("set_gradient_divide_factor", changed)
        _keep(changed)
        _describe_anew(changed, lambda param: dataclasses.replace(param, divisor=factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; this is its former name in FSDP2."""
        self.set_gradient_divide_factor(factor)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the current stream, and so the next forward's gathers, wait for `event`."""
        event.wait()


def modules_of(control: Any, recurse: bool) -> list[nn.Module]:
    """Return the modules whose parameters a control changes: those of one group, or of all groups inside it, too.

    A group's modules are all those that one `fully_shard` call got, on whichever of them the control is called.
    """
    assert isinstance(control, nn.Module)
    found = dict.fromkeys(control.modules() if recurse else ())
    pending = [part for each in (list(found) or [control]) for part in parts_of(each)]
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = None
            pending += [child for child in module.children() if "_overlapc_groups" not in child.__dict__]
    return list(found)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return all modules that the `fully_shard` call of `module` got; it alone if it is a copy, or not of a group."""
    groups = module.__dict__.get("_overlapc_groups", ())
    parts = [part for group in groups[:1] for each in group.modules if (part := each()) is not None]
    return parts if any(part is module for part in parts) else [module]


def _refuse_unreduced(what: str, modules: Iterable[nn.Module]) -> None:
    for module in modules:
        pending = module.__dict__.get("_overlapc_pending")
        if module.__dict__.get("_overlapc_unsynced") or (pending is not None and pending.gradients):
            raise ConfigError(
                f"{what}: gradients of this {type(module).__name__} are not reduced yet; call it before "
                "set_requires_gradient_sync(False), or after the backward that reduces them"
            )


def _describe_anew(modules: Iterable[nn.Module], change: Callable[[ShardedParam], ShardedParam]) -> None:
    """Replace the descriptions of the modules' parameters; tied parameters keep sharing one description."""
    changed: dict[int, ShardedParam] = {}
    for module in modules:
        params: dict[str, ShardedParam] = module.__dict__.get("_overlapc_params", {})
        for name, param in params.items():
            if id(param) not in changed:
                changed[id(param)] = _variant(change(param))
            params[name] = new = changed[id(param)]
            module.__dict__["_overlapc_keys"][name] = new.key
            module.__dict__["_overlapc_forms"][name] = new.form
            parameter = module._parameters[name]
            if parameter is not None:
                parameter._overlapc_sharded = parameter, new  # type: ignore[attr-defined]


def _keep(modules: Iterable[nn.Module]) -> None:
    """Keep the parameters' descriptions under their present options: a backward to come may refer to their keys."""
    for param in (param for module in modules for param in managed(module).values()):
        param.variants.setdefault(_options(param), param)


def _variant(param: ShardedParam) -> ShardedParam:
    """Return `param` under the key of its current options, which is an earlier key if it had these options before."""
    if _options(param) not in param.variants:
        param.variants[_options(param)] = dataclasses.replace(param)
    return param.variants[_options(param)]


def _options(param: ShardedParam) -> object:
    return param.group.reshard_after_forward, param.group.post, param.divisor


def _hint(name: str) -> Callable[..., None]:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        _log.info("%s: the compiler decides when collectives run; ignored", name)

    method.__name__, method.__doc__ = name, "Accepted and ignored: the compiler decides when collectives run."
    return method


def refusal(name: str, instead: str) -> Callable[..., None]:
    """Return a method that raises ConfigError with what to do instead."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = (*args, *kwargs.values())[:1]
        if asked not in ((None,), (False,)):  # these values ask for the default, which holds anyway
            raise ConfigError(f"{name}: not possible in a compiled graph; {instead}")

    method.__name__, method.__doc__ = name, f"Not possible in a compiled graph; {instead}."
    return method


for _name in HINTS:
    setattr(Controls, _name, _hint(_name))
for _name, _instead in REFUSED.items():
    setattr(Controls, _name, refusal(_name, _instead))
