"""Writes the stages of a compilation as text on request: to files (`OVERLAPC_DUMP=passes`) or to stderr
(`OVERLAPC_DEBUG=fusion`)."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist

from overlapc.config import Config


class Dumps:
    """Writes the stages of one graph to `<dump_dir>/rank<r>/<graph>/<what>.txt`."""

    def __init__(self, config: Config, graph: str) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.config = config
        self.folder = config.dump_dir / f"rank{rank}" / graph

    def write(self, stage: str, what: str, text: Callable[[], str], suffix: str = "txt") -> None:
        """Write or print `what` of `stage`; `text` is called only if the options ask for the stage."""
        to_file, printed = self.config.wants_dump(stage), self.config.wants_debug(stage)
        if not to_file and not printed:
            return
        made = text()
        if to_file:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{what}.{suffix}").write_text(made)
        if printed:
            print(
                f"[overlapc {self.folder.parent.name} {self.folder.name}] {what}\n{made}", file=sys.stderr, flush=True
            )

    def writer(self, stage: str) -> Callable[[str, str], None] | None:
        """Return a function of (what, text) that writes texts of `stage`; None if the options do not ask for it."""
        if not (self.config.wants_dump(stage) or self.config.wants_debug(stage)):
            return None
        return lambda what, text: self.write(stage, what, lambda: text)
