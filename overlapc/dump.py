"""Every stage of a compilation as text files, when asked for (`OVERLAPC_DUMP=passes` or `all`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from overlapc.config import Config


class Dumps:
    """Writes the stages of one graph to `<dump_dir>/rank<r>/<graph>/<what>.txt`."""

    def __init__(self, config: Config, graph: str) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.config = config
        self.folder = Path(config.dump_dir) / f"rank{rank}" / graph

    def write(self, stage: str, what: str, text: Callable[[], str], suffix: str = "txt") -> None:
        """The text is made only if `stage` is wanted."""
        if self.config.wants_dump(stage):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{what}.{suffix}").write_text(text())

    def writer(self, stage: str) -> Callable[[str, str], None] | None:
        """A function for (what, text) of one stage; None when it is not wanted."""
        if not self.config.wants_dump(stage):
            return None
        return lambda what, text: self.write(stage, what, lambda: text)
