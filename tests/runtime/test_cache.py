"""The kernel cache: built once whoever asks, and never trusted blindly."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from overlapc.errors import ConfigError
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.counters import counted


class Builder:
    """Writes `content` and counts how often it was asked to."""

    def __init__(self, content: bytes = b"kernel") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.content)


def test_parts_of_a_key_do_not_run_together():
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("ab", "c") == content_key(b"ab", b"c")


def test_an_entry_is_built_once_and_counted(tmp_path: Path):
    build, compiles, hits = Builder(), counted("kernel_compiles"), counted("kernel_cache_hits")
    cache = KernelCache(tmp_path)
    first = cache.get_or_build("k" * 40, ".so", build)
    assert first.read_bytes() == b"kernel"
    assert cache.get_or_build("k" * 40, ".so", build) == first
    assert KernelCache(tmp_path).get_or_build("k" * 40, ".so", build) == first
    assert build.calls == 1
    assert counted("kernel_compiles") - compiles == 1
    assert counted("kernel_cache_hits") - hits == 2


def test_suffixes_are_entries_of_their_own(tmp_path: Path):
    cache = KernelCache(tmp_path)
    assert cache.get_or_build("k" * 40, ".so", Builder(b"1")) != cache.get_or_build("k" * 40, ".cubin", Builder(b"2"))


@pytest.mark.parametrize("damage", [b"", b"kernek", b"kernel and more"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: bytes):
    build = Builder()
    path = KernelCache(tmp_path).get_or_build("k" * 40, ".so", build)
    path.write_bytes(damage)
    assert KernelCache(tmp_path).get_or_build("k" * 40, ".so", build).read_bytes() == b"kernel"
    assert build.calls == 2


def test_an_entry_without_its_checksum_is_built_again(tmp_path: Path):
    """As a crash between the two renames leaves it."""
    build = Builder()
    path = KernelCache(tmp_path).get_or_build("k" * 40, ".so", build)
    path.with_name(path.name + ".sha256").unlink()
    KernelCache(tmp_path).get_or_build("k" * 40, ".so", build)
    assert build.calls == 2


def test_a_checksum_without_its_file_is_no_entry(tmp_path: Path):
    build = Builder()
    KernelCache(tmp_path).get_or_build("k" * 40, ".so", build).unlink()
    assert KernelCache(tmp_path).get_or_build("k" * 40, ".so", build).exists()
    assert build.calls == 2


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path):
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no")

    cache = KernelCache(tmp_path)
    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_build("k" * 40, ".so", fail)
    assert not cache.path("k" * 40, ".so").exists()
    assert not list(tmp_path.rglob("new*"))
    assert cache.get_or_build("k" * 40, ".so", Builder()).read_bytes() == b"kernel"


def test_threads_that_ask_at_once_share_one_build(tmp_path: Path):
    started = threading.Barrier(4)
    build = Builder()

    def ask() -> None:
        started.wait(timeout=10)
        KernelCache(tmp_path).get_or_build("k" * 40, ".so", build)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert build.calls == 1


def test_an_unwritable_folder_is_named_with_what_to_set(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="OVERLAPC_CACHE_DIR") as caught:
        KernelCache(blocked).get_or_build("k" * 40, ".so", Builder())
    assert str(blocked) in str(caught.value)


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path):
    def fill(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    cache = KernelCache(tmp_path)
    with pytest.raises(
        ConfigError, match="No space left on device; make room there, or set OVERLAPC_CACHE_DIR"
    ) as caught:
        cache.get_or_build("k" * 40, ".so", fill)
    assert str(cache.root) in str(caught.value)
    assert cache.get_or_build("k" * 40, ".so", Builder()).read_bytes() == b"kernel"
