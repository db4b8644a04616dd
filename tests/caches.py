"""Cache folders of tests in which nothing is compiled yet, except what no program changes."""

from __future__ import annotations

from pathlib import Path

# overlapc's own C libraries, which each process loads whatever it compiles: to build them takes a CPU second.
# tests/test_build_ahead.py, runtime/test_native_launcher.py and estimators/simulator test that they are built.
ALWAYS_THE_SAME = ("launchers", "simulators")


def new_cache(folder: Path | str) -> Path:
    """Make a folder for `cache_dir` and return it. Its C libraries are those of the tests' common cache."""
    from overlapc.config import Config

    made, common = Path(folder), Config().cache_dir
    made.mkdir(0o755, parents=True, exist_ok=True)
    for kind in ALWAYS_THE_SAME:
        (common / kind).mkdir(0o755, parents=True, exist_ok=True)
        if not (made / kind).exists():
            (made / kind).symlink_to(common / kind)
    return made


def cache_of_rank(root: Path | str) -> str:
    """Return a folder for `cache_dir` of this rank alone, as on a host of its own."""
    import torch.distributed as dist

    return str(new_cache(Path(root) / str(dist.get_rank())))
