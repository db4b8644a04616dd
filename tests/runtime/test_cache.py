"""The kernel cache: concurrent requests share one build, and entries are verified before use."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlapc.errors import ConfigError
from overlapc.runtime import cache as cache_module
from overlapc.runtime.cache import KernelCache, content_key, refusal
from overlapc.runtime.counters import counted
from overlapc.runtime.toolchain import compile_error


class Builder:
    """A build function that writes `content` and counts its calls."""

    def __init__(self, content: bytes = b"kernel") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.content)


def test_parts_of_a_key_are_separated():
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


def test_entries_with_different_suffixes_are_different(tmp_path: Path):
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
    """A crash between the two renames leaves such an entry."""
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


def test_content_that_is_known_needs_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", None)  # to remove one takes 3 ms on some file systems
    path = KernelCache(tmp_path).put("k" * 40, ".json", "text")
    assert KernelCache(tmp_path).read("k" * 40, ".json") == b"text"
    assert sorted(each.suffix for each in path.parent.iterdir()) == [".json", ".lock", ".sha256"]


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


@pytest.fixture(autouse=True)
def no_cache_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())
    cache_module._folder_of_process.cache_clear()


def kept_privately(cache: KernelCache, warning: str) -> Path:
    """Assert that an entry is stored in a private folder of the process, with one warning; return its path."""
    build = Builder()
    with pytest.warns(UserWarning, match=warning):
        path = cache.get_or_build("k" * 40, ".so", build)
    assert path.read_bytes() == b"kernel"
    assert cache.root not in path.parents
    assert path.parents[2].stat().st_mode & 0o777 == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning comes only once
        assert cache.get_or_build("k" * 40, ".so", build) == path
        assert cache.find("k" * 40, ".so") == path
        assert cache.read("k" * 40, ".so") == b"kernel"
    assert build.calls == 1
    with pytest.raises(ConfigError, match=warning):
        cache.get_or_build("k" * 39 + "m", ".so", build, private=False)
    with pytest.raises(ConfigError, match=warning):
        cache.update("k" * 40, ".so", lambda content: b"")
    return path


def test_entries_that_cannot_be_written_are_stored_by_the_process(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    kept_privately(
        KernelCache(blocked), f"cannot write to {blocked}/kernels: .*; make room there, or set OVERLAPC_CACHE_"
    )


def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path):
    def fill(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    cache = KernelCache(tmp_path)
    with (
        pytest.raises(ConfigError, match="No space left on device; make room there, or set OVERLAPC_CACHE_DIR"),
        pytest.warns(UserWarning, match=f"cannot write to {cache.root}: No space left on device"),
    ):
        cache.get_or_build("k" * 40, ".so", fill)
    assert cache.get_or_build("k" * 40, ".so", Builder()).read_bytes() == b"kernel"


def test_a_full_disk_while_linking_is_not_an_error_of_the_kernel(tmp_path: Path):
    for said in ("/usr/bin/ld: final link failed: No space left on device", "signal 25 [File size limit exceeded]"):
        with pytest.raises(OSError, match=r"No space left|File too large"):
            compile_error(["g++"], said, tmp_path)
    assert "expected ';'" in str(compile_error(["g++"], "a.cpp:1:2: error: expected ';'", tmp_path))


def swap(one: Path, two: Path) -> None:
    """Exchange two entries together with their checksums."""
    for end in ("", ".sha256"):
        first, second, aside = Path(f"{one}{end}"), Path(f"{two}{end}"), Path(f"{one}.aside")
        first.rename(aside)
        second.rename(first)
        aside.rename(second)


def two_entries(cache: KernelCache) -> tuple[Path, Path]:
    one = cache.get_or_build("a" * 40, ".so", Builder(b"one"))
    return one, cache.get_or_build("b" * 40, ".so", Builder(b"two"))


def test_swapped_entries_are_built_again(tmp_path: Path):
    one, two = two_entries(KernelCache(tmp_path))
    swap(one, two)
    cache = KernelCache(tmp_path)
    assert cache.read("a" * 40, ".so") is None
    assert cache.find("b" * 40, ".so") is None
    assert [path.read_bytes() for path in two_entries(cache)] == [b"one", b"two"]


def test_an_entry_copied_to_another_kind_is_not_accepted(tmp_path: Path):
    two_entries(KernelCache(tmp_path, "graphs"))
    shutil.copytree(tmp_path / "graphs", tmp_path / "steps")
    assert KernelCache(tmp_path, "graphs").read("a" * 40, ".so") == b"one"
    assert KernelCache(tmp_path, "steps").read("a" * 40, ".so") is None


def a_folder(path: Path) -> None:
    (path / "with").mkdir(parents=True)
    (path / "with" / "files").write_text("")


def a_loop(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


@pytest.mark.parametrize("left", [a_folder, a_loop, os.mkfifo])
@pytest.mark.parametrize("place", ["{}", "{}.sha256", "{}.lock", ""])
def test_folders_links_and_pipes_are_replaced_by_entries(tmp_path: Path, left: Callable[[Path], None], place: str):
    build = Builder()
    whole = KernelCache(tmp_path).get_or_build("k" * 40, ".so", build)
    path = whole.with_name(place.format(whole.name)) if place else whole.parent
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    left(path)
    cache = KernelCache(tmp_path)
    if not place.endswith(".lock"):
        assert cache.read("k" * 40, ".so") is None
        assert cache.find("k" * 40, ".so") is None
        cache.drop("k" * 40, ".so")
    assert cache.get_or_build("k" * 40, ".so", build) == whole
    assert whole.read_bytes() == b"kernel"
    calls = build.calls
    assert KernelCache(tmp_path).get_or_build("k" * 40, ".so", build) == whole
    assert build.calls == calls  # the next start finds the entry
    cache.update("k" * 40, ".so", lambda content: content + b"2")
    assert KernelCache(tmp_path).read("k" * 40, ".so") == b"kernel2"


@pytest.fixture
def plain_user() -> Iterator[Path]:
    """Drop root privileges during the test and return an empty folder of the user."""
    user = os.geteuid() or 65534
    folder = Path(tempfile.mkdtemp())
    os.chown(folder, user, -1)
    os.seteuid(user)
    yield folder
    os.seteuid(os.getuid())
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["{}", "{}.sha256", "{}.lock"])
def test_a_file_that_may_not_be_read_is_built_again_once(plain_user: Path, name: str):
    build = Builder()
    whole = KernelCache(plain_user).get_or_build("k" * 40, ".so", build)
    whole.with_name(name.format(whole.name)).chmod(0)
    if name.endswith(".lock"):
        whole.unlink()
    for _ in range(2):
        assert KernelCache(plain_user).get_or_build("k" * 40, ".so", build).read_bytes() == b"kernel"
    assert build.calls == 2


def test_a_read_only_folder_is_still_read(plain_user: Path):
    cache = KernelCache(plain_user)
    whole = cache.get_or_build("a" * 40, ".so", Builder(b"one"))
    for folder in (whole.parent, cache.root, plain_user):
        folder.chmod(0o555)
    again = KernelCache(plain_user)
    again.drop("b" * 40, ".so")
    kept_privately(again, "cannot write to .*: Permission denied; make room there, or set OVERLAPC_CACHE_DIR")
    assert again.get_or_build("a" * 40, ".so", Builder()) == whole
    for folder in (plain_user, cache.root, whole.parent):
        folder.chmod(0o755)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_folder_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, level: int
):
    """As OpenSSH refuses such key files: whoever can write there can run code as this user."""
    monkeypatch.setattr(cache_module, "_is_private", lambda group, user: False)
    root = tmp_path / "cache"
    whole = KernelCache(root).get_or_build("k" * 40, ".so", Builder(b"theirs"))
    folder = whole.parents[level]
    folder.chmod(mode)
    assert KernelCache(root).find("k" * 40, ".so") is None
    why = f"{folder} holds code that overlapc runs, but .* may write to it .mode {mode:04o}.; .*chmod -R go-w {folder}"
    kept_privately(KernelCache(root), why)
    folder.chmod(0o755)
    assert KernelCache(root).find("k" * 40, ".so") == whole


def test_a_folder_of_another_user_is_refused(plain_user: Path, monkeypatch: pytest.MonkeyPatch):
    KernelCache(plain_user).get_or_build("k" * 40, ".so", Builder(b"theirs"))
    me = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: me)
    assert KernelCache(plain_user).read("k" * 40, ".so") is None
    why = f"{plain_user} holds code that overlapc runs, but it belongs to .* and this process runs as .*; set OVERLAPC"
    assert re.match(why, refusal(plain_user) or "")


def test_a_file_that_others_may_write_to_is_built_again(tmp_path: Path):
    whole = KernelCache(tmp_path).get_or_build("k" * 40, ".so", Builder(b"theirs"))
    whole.chmod(0o646)
    assert KernelCache(tmp_path).get_or_build("k" * 40, ".so", Builder()).read_bytes() == b"kernel"
    assert whole.stat().st_mode & 0o022 == 0


def test_only_the_user_can_write_folders_and_files_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        KernelCache(tmp_path / "new" / "cache").get_or_build("k" * 40, ".so", Builder())
    finally:
        os.umask(before)
    for path in (tmp_path / "new").rglob("*"):
        assert path.suffix == ".lock" or path.stat().st_mode & 0o022 == 0, path


def test_a_group_with_one_member_counts_as_private(monkeypatch: pytest.MonkeyPatch):
    """On systems with umask 0002, each user has a private group of the same name."""
    user = SimpleNamespace(pw_name="ann", pw_gid=1000)
    monkeypatch.setattr(cache_module.pwd, "getpwuid", lambda number: user)
    for name, members, private in (
        ("ann", [], True),
        ("ann", ["ann"], True),
        ("ann", ["bob"], False),
        ("ml", [], False),
    ):
        cache_module._is_private.cache_clear()
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(cache_module.grp, "getgrgid", lambda number, group=group: group)
        assert cache_module._is_private(1000, 1000) is private
    cache_module._is_private.cache_clear()
