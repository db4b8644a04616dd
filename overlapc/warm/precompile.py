"""Load a cached step without tracing, if the user asked torch to store what Dynamo captured.

    torch._dynamo.config.caching_precompile = True      # or TORCH_CACHING_PRECOMPILE=1
    …; torch.compiler.save_cache_artifacts()            # once, after the first steps

torch then stores guards and bytecode by the compiled function's source, and checks them when it loads them; the result
of the backend is an artifact under the name of its graph. Our artifact contains no code, only the key of the step in
`cache_dir`, the fingerprint of the environment, and replacements of the guards that torch leaves out (`unguarded`). All
of these are compared before the step is used; if one differs, Dynamo traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch._dynamo.bytecode_transformation import unique_id
from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Guard, TracingContext
from torch.fx import GraphModule

from overlapc.config import Config
from overlapc.errors import OverlapcError
from overlapc.runtime.counters import count
from overlapc.warm.cached_step import find
from overlapc.warm.loading import environment_of, load_step
from overlapc.warm.unguarded import Named, Unguarded, named


@dataclass(frozen=True)
class CachedStepKey:
    """The cache key of a step, and the environment that it was compiled for."""

    key: str
    environment: tuple[str, str]
    options: Mapping[str, Any] | Config | None  # as the user gave them: environment variables are read again
    mode: str | None
    devices: tuple[str, ...]
    module: str = ""  # the module of the function that was traced
    names: tuple[Named, ...] = ()
    ids: int = 0  # number of names that Dynamo had generated when the trace was stored

    @property
    def config(self) -> Config:
        """The options as they apply in this process."""
        return Config.of(self.options, self.mode)


class CachedStepMissing(OverlapcError):
    """A step whose guards torch stored cannot be loaded."""


class StepArtifact(BackendCacheArtifact[Callable[..., Any]]):
    """The artifact that torch pickles beside its guards; `content` is a `CachedStepKey`.

    If the step cannot be loaded, unpickling the artifact raises an error: torch 2.13 then logs it and compiles, but it
    cannot recover from an error in `after_deserialization`.
    """

    guards: tuple[Guard, ...] | None = None  # of the trace, if it was made in this process

    def after_deserialization(self) -> Callable[..., Any]:
        """Return the step."""
        _pass_over_names(self.content.ids)
        step = load_step(self.content.key, self.content.config)
        if step is None:
            raise _missing(self.content)
        return step

    def __reduce__(self) -> tuple[Callable[..., StepArtifact], tuple[Any, ...]]:
        if self.guards is None:
            return _unpickled, (self.key, self.content)
        try:  # again: Dynamo has built the guards since `record`, and some turned out to compare identity
            names = named(self.guards, self.content.module)
        except Unguarded as reason:
            return _refused, (str(reason),)
        return _unpickled, (self.key, replace(self.content, names=names, ids=_names_made()))

    def __deepcopy__(self, memo: dict[int, Any]) -> StepArtifact:
        copied = StepArtifact(self.key, self.content)  # neither changes
        copied.guards = self.guards
        return copied


def record(gm: GraphModule, stored: CachedStepKey) -> None:
    """Tell torch how to find the step compiled from `gm`, the graph that Dynamo captured; called within the backend.

    Does nothing if a later process could not check whether the trace is valid; torch then stores nothing of it.
    """
    name = getattr(gm, "_backend_id", None)
    if name is None:
        return
    guards = tuple(TracingContext.get().guards_context.dynamo_guards)
    module = str(InstructionTranslator.current_tx().output.global_scope["__name__"])
    try:
        named(guards, module)
    except Unguarded as reason:
        count(f"trace not stored: {reason}")
        return
    artifact = StepArtifact(key=name, content=replace(stored, module=module))
    artifact.guards = guards
    PrecompileContext.record_artifact(artifact)


def _unpickled(key: str, stored: CachedStepKey) -> StepArtifact:
    if environment_of(stored.config, stored.devices) != stored.environment:
        raise CachedStepMissing("the step was compiled by another version, or for another machine or state of torch")
    for each in stored.names:
        each.expect(stored.module)
    if find(stored.key, stored.config.cache_dir) is None:
        raise _missing(stored)
    return StepArtifact(key, stored)


def _refused(reason: str) -> StepArtifact:
    raise Unguarded(f"this trace was not stored: {reason}")


def _missing(stored: CachedStepKey) -> CachedStepMissing:
    return CachedStepMissing(f"the step is no longer in the cache, {stored.config.cache_dir}")


# --- names that Dynamo generates


def _names_made() -> int:
    return int(unique_id("").rsplit("_", 1)[1])


def _pass_over_names(made: int) -> None:
    """Make Dynamo number new names after those that a stored trace puts into the same modules.

    torch 2.11 to 2.13 count from zero in every process, so a new trace, after a guard of a stored one failed, would
    reuse its names and fail.
    """
    while _names_made() < made:
        pass
