"""A kept step that Dynamo need not trace again, where the user asks torch to keep what it captured.

    torch._dynamo.config.caching_precompile = True      # or TORCH_CACHING_PRECOMPILE=1
    …; torch.compiler.save_cache_artifacts()            # once, after the first steps

torch then keeps guards and bytecode by the compiled function's source, and checks them when it loads them; what the
backend made is an artifact under the name of its graph. Ours holds no code: the key of the step in `cache_dir`, and
the fingerprint of the environment, which is compared before the step is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext
from torch.fx import GraphModule

from overlapc.config import Config
from overlapc.errors import OverlapcError
from overlapc.warm.step import find


@dataclass(frozen=True)
class Kept:
    """Where to find a step, and for what environment it was made."""

    key: str
    environment: tuple[str, str]
    config: Config
    devices: tuple[str, ...]


class StepIsGone(OverlapcError):
    """A step that torch kept the guards of is not to be had."""


class StepArtifact(BackendCacheArtifact[Callable[..., Any]]):
    """What torch pickles beside its guards; `content` is a `Kept`.

    A step that is not to be had is an error while the artifact is unpickled: torch 2.13 then says so and compiles, but
    has no way back from an error in `after_deserialization`.
    """

    def after_deserialization(self) -> Callable[..., Any]:
        """The step."""
        from overlapc.backend import kept_step  # which imports this only where it is used

        step = kept_step(self.content.key, self.content.config)
        if step is None:
            raise _gone(self.content)
        return step

    def __reduce__(self) -> tuple[Callable[..., StepArtifact], tuple[str, Kept]]:
        return _unpickled, (self.key, self.content)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepArtifact:
        return StepArtifact(self.key, self.content)  # neither changes


def _unpickled(key: str, kept: Kept) -> StepArtifact:
    from overlapc.backend import environment_of

    if environment_of(kept.config, kept.devices) != kept.environment:
        raise StepIsGone("the step was made by another version, or for another machine or state of torch")
    if find(kept.key, kept.config.cache_dir) is None:  # type: ignore[arg-type]
        raise _gone(kept)
    return StepArtifact(key, kept)


def _gone(kept: Kept) -> StepIsGone:
    return StepIsGone(f"the step is no longer kept in {kept.config.cache_dir}")


def record(gm: GraphModule, kept: Kept) -> None:
    """Tells torch how to find the step that `gm`, as Dynamo captured it, is going to be."""
    name = getattr(gm, "_backend_id", None)
    if name is not None:
        PrecompileContext.record_artifact(StepArtifact(key=name, content=kept))
