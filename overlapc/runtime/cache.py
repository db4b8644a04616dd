"""Compiled kernels on disk, by the hash of everything they are made from.

Safe for many ranks of one host at once: an entry is built under a file lock, written beside its place and renamed
into it. What is found is checked against a SHA-256 that was written last, so a torn or damaged file is built again,
never loaded. Nothing in it is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from overlapc.errors import ConfigError, ToolchainError
from overlapc.runtime.counters import count

if TYPE_CHECKING:
    from filelock import BaseFileLock

# A compile takes seconds; a lock held for this long means a stuck process, which the user should hear about.
LOCK_TIMEOUT_S = 600.0


def content_key(*parts: str | bytes) -> str:
    """Hash of all that a build depends on: source, flags, compiler, CPU … 40 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") and ("a", "bc") differ
        digest.update(data)
    return digest.hexdigest()[:40]


class KernelCache:
    """Files under `root/<kind>`, each with a `.sha256` beside it that vouches for it.

    `kind` also names the counters: `kernel_compiles` and `kernel_cache_hits` for "kernels".
    """

    def __init__(self, root: Path | str, kind: str = "kernels") -> None:
        self.root = Path(root) / kind
        self._one = kind.removesuffix("s")
        self._seen: set[Path] = set()  # checked by this process already

    def path(self, key: str, suffix: str) -> Path:
        """Where the entry lies once it is built; 256 folders keep listings short."""
        return self.root / key[:2] / f"{key}{suffix}"

    def get_or_build(self, key: str, suffix: str, build: Callable[[Path], None]) -> Path:
        """The entry's file, built by `build(temporary_path)` unless a whole one is there.

        Of many processes that ask at once, one builds and the others wait for it. What `build` raises goes to the
        caller and leaves no entry. ConfigError when the folder cannot be written, ToolchainError when another
        process holds the lock for ten minutes.
        """
        path = self.path(key, suffix)
        if self._whole(path):
            count(f"{self._one}_cache_hits")
            return path
        try:
            lock = self._lock(path)
            try:
                if not self._whole(path):  # nobody built it while we waited
                    self._build(path, suffix, build)
                else:
                    count(f"{self._one}_cache_hits")
            finally:
                lock.release()
        except OSError as error:  # of a folder that is read-only, or a disk that is full
            raise ConfigError(
                f"cannot write compiled kernels to {self.root}: {error.strerror}; make room there, or set"
                " OVERLAPC_CACHE_DIR to another folder"
            ) from error
        return path

    def put(self, key: str, suffix: str, content: str | bytes) -> Path:
        """The entry's file, which holds `content` unless a whole one was there."""
        return self.get_or_build(key, suffix, lambda path: _write(path, content))

    def find(self, key: str, suffix: str) -> Path | None:
        """The entry's file if a whole one is there."""
        path = self.path(key, suffix)
        return path if self._whole(path) else None

    def read(self, key: str, suffix: str) -> bytes | None:
        """The entry's content if a whole one is there; a torn or damaged one is as good as none."""
        path = self.path(key, suffix)
        try:
            content = path.read_bytes()
            whole = _voucher(path).read_text() == hashlib.sha256(content).hexdigest()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            whole = False
        if not whole:
            self._seen.discard(path)
            return None
        return content

    def drop(self, key: str, suffix: str) -> None:
        """Forgets an entry that is whole, but not what its reader expects: the next `get_or_build` makes it anew."""
        path = self.path(key, suffix)
        self._seen.discard(path)
        _voucher(path).unlink(missing_ok=True)

    def _lock(self, path: Path) -> BaseFileLock:
        """The entry's lock, held; the system drops it when a process dies."""
        from filelock import FileLock, Timeout  # with asyncio, which a process that finds everything does without

        lock = FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise ToolchainError(
                f"another process has been building {path.name} for {LOCK_TIMEOUT_S:.0f} s; "
                f"if none is running, delete {path}.lock"
            ) from None
        return lock

    def _build(self, path: Path, suffix: str, build: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
            temporary = Path(folder) / f"new{suffix}"
            build(temporary)
            count(f"{self._one}_compiles")
            vouch = Path(folder) / "sha256"
            vouch.write_text(_sha256(temporary))
            # The old voucher goes first: a crash between the two renames must not leave one for another file.
            _voucher(path).unlink(missing_ok=True)
            os.replace(temporary, path)
            os.replace(vouch, _voucher(path))
        self._seen.add(path)

    def _whole(self, path: Path) -> bool:
        if path in self._seen and path.exists():  # users delete caches under running jobs
            return True
        try:
            whole = _voucher(path).read_text() == _sha256(path)
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return False
        if whole:
            self._seen.add(path)
        return whole

    def keep_text(self, name: str, lines: Iterable[str]) -> Path:
        """Writes a source or log for people to read, beside the kernels; returns where."""
        path = self.root / "failed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
        return path


def _write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _voucher(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
