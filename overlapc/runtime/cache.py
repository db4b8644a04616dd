"""The disk cache of compiled kernels, compiled graphs and steps, and measured times.

The key of an entry is the hash of everything that the entry is made from. Many ranks of one host may use the cache at
once: an entry is built under a file lock, written to a temporary file and renamed. Each entry has a checksum, written
last: a SHA-256 of its name and content. A torn or damaged file, or one under a wrong key, is rebuilt, never loaded.
Nothing is unpickled.

Entries are code that runs as the user, so a folder or file that other users own or may write to is not used
(`refusal`). In that case, and if the folder cannot be written, a process warns and stores what it compiles in a
temporary folder.
"""

from __future__ import annotations

import atexit
import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from overlapc.errors import ConfigError, ToolchainError
from overlapc.runtime.counters import count

# Compiling takes seconds; a lock held for this long means a stuck process, which is reported to the user.
LOCK_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.005  # ranks of a host write entries at the same time, in milliseconds each

_FORMAT = "2"  # version of the checksums
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_warned: set[Path] = set()  # cache folders that this process does not use
_ELSEWHERE = "set OVERLAPC_CACHE_DIR to another folder"


def content_key(*parts: str | bytes) -> str:
    """Return the hash of everything that a build depends on (source, flags, compiler, CPU, …) as 40 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") and ("a", "bc") differ
        digest.update(data)
    return digest.hexdigest()[:40]


class KernelCache:
    """The cache entries under `root/<kind>`: files, each with its hash in a `.sha256` file.

    `kind` also names the counters: `kernel_compiles` and `kernel_cache_hits` for "kernels".
    """

    def __init__(self, root: Path | str, kind: str = "kernels") -> None:
        self.folder = Path(root)
        self.root = self.folder / kind
        self._kind = kind
        self._counter_prefix = kind.removesuffix("s")
        self._seen: set[Path] = set()  # files that this process has checked
        self._safe: set[Path] = set()  # folders that `refusal` allows
        self._spare: KernelCache | None = None  # the temporary folder, for entries that cannot be stored in `root`

    def path(self, key: str, suffix: str) -> Path:
        """Return the entry's path, whether or not it is built; 256 folders keep directory listings short."""
        return self.root / key[:2] / f"{key}{suffix}"

    def get_or_build(
        self, key: str, suffix: str, build: Callable[[Path], None] | bytes, *, private: bool = True
    ) -> Path:
        """Return the entry's file, built by `build(temporary_path)`, or with this content, unless an intact one exists.

        If many processes ask at once, one builds and the others wait for it. An exception in `build` is passed on and
        leaves no entry. If the folder is not safe or cannot be written, the entry goes to a temporary folder of this
        process, or, with private=False, ConfigError is raised. Raises ToolchainError if another process holds the lock
        for ten minutes.
        """
        found = self.find(key, suffix)
        if found is not None:
            count(f"{self._counter_prefix}_cache_hits")
            return found
        path = self.path(key, suffix)
        problem = self._refusal(path)
        if problem is None:
            try:
                self._obtain(path, build)
            except OSError as error:  # the folder is read-only, or the disk is full
                problem = self._unwritable(error)
            else:
                return path
        if not private:
            raise ConfigError(problem)
        return self._spare_for(problem).get_or_build(key, suffix, build, private=False)

    def put(self, key: str, suffix: str, content: str | bytes) -> Path:
        """Return the entry's file, written with `content` unless an intact one exists."""
        return self.get_or_build(key, suffix, _bytes(content))

    def update(self, key: str, suffix: str, change: Callable[[bytes | None], str | bytes | None]) -> None:
        """Replace the entry's content by `change(content)`, under its lock; `content` is None if no entry is intact.

        If `change` returns None, the entry stays as it is. Raises ConfigError if the folder cannot be used.
        """
        path = self.path(key, suffix)
        problem = self._refusal(path)
        if problem is None:
            try:
                with self._lock(path):
                    content = change(self.read(key, suffix))
                    if content is not None:
                        self._store(path, _bytes(content))
            except OSError as error:
                problem = self._unwritable(error)
        if problem is not None:
            raise ConfigError(problem)

    def find(self, key: str, suffix: str) -> Path | None:
        """Return the entry's file; None if it is missing or not intact."""
        path = self.path(key, suffix)
        if self._is_intact(path):
            return path
        return None if self._spare is None else self._spare.find(key, suffix)

    def read(self, key: str, suffix: str) -> bytes | None:
        """Return the entry's content; None if it is missing, torn or damaged."""
        path = self.path(key, suffix)
        content = self._content(path)
        if content is None:
            self._seen.discard(path)
            return None if self._spare is None else self._spare.read(key, suffix)
        return content

    def drop(self, key: str, suffix: str) -> None:
        """Remove an intact entry that its reader cannot use, so that the next `get_or_build` rebuilds it."""
        path = self.path(key, suffix)
        self._seen.discard(path)
        try:
            _checksum_path(path).unlink(missing_ok=True)
        except OSError:  # the folder is read-only: the entry stays, and each reader rejects it again
            return

    def _obtain(self, path: Path, build: Callable[[Path], None] | bytes) -> None:
        with self._lock(path):
            if not self._is_intact(path):  # no other process built it while this one waited for the lock
                self._store(path, build if isinstance(build, bytes) else self._built(path, build))
            else:
                count(f"{self._counter_prefix}_cache_hits")

    @contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        """Hold the entry's lock, which the operating system releases if the process dies."""
        from filelock import FileLock, Timeout  # imports asyncio, which a process that only reads entries avoids

        _make_folder(path.parent)
        name = Path(f"{path}.lock")
        _clear(name)
        if name.exists() and not os.access(name, os.R_OK | os.W_OK, effective_ids=True):
            _remove(name)
        lock = FileLock(name, timeout=LOCK_TIMEOUT_S)
        try:
            lock.acquire(poll_interval=LOCK_POLL_S)
        except Timeout:
            raise ToolchainError(
                f"another process has been building {path.name} for {LOCK_TIMEOUT_S:.0f} s; "
                f"if none is running, delete {name}"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def _built(self, path: Path, build: Callable[[Path], None]) -> bytes:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-", ignore_cleanup_errors=True) as folder:
            temporary = Path(folder) / f"new{path.suffix}"
            build(temporary)
            return temporary.read_bytes()

    def _store(self, path: Path, content: bytes) -> None:
        # In the entry's own folder: to remove a temporary folder takes 3 ms on some file systems, as long as the rest.
        new = path.with_name(f".new-{os.urandom(8).hex()}")
        try:
            _write_new(new, content)
            _write_new(_checksum_path(new), self._checksum(path, content).encode())
            # Remove the old checksum first: a crash between the two renames must not leave it beside the new file.
            for old in (_checksum_path(path), path):
                _clear(old)
            _checksum_path(path).unlink(missing_ok=True)
            os.replace(new, path)
            os.replace(_checksum_path(new), _checksum_path(path))
        except BaseException:
            for left in (new, _checksum_path(new)):
                left.unlink(missing_ok=True)
            raise
        count(f"{self._counter_prefix}_compiles")
        self._seen.add(path)

    def _is_intact(self, path: Path) -> bool:
        if path in self._seen and path.exists():  # users delete caches under running jobs
            return True
        whole = self._content(path) is not None
        if whole:
            self._seen.add(path)
        return whole

    def _content(self, path: Path) -> bytes | None:
        """Return the file's content if its `.sha256` matches and only this user could have written both; else None."""
        if self._refusal(path) is not None:
            return None
        content, checksum = _read_own(path), _read_own(_checksum_path(path))
        return content if content is not None and checksum == self._checksum(path, content).encode() else None

    def _checksum(self, path: Path, content: bytes) -> str:
        """Return the hash of `content` as the entry `path`; the same content has another hash in another entry."""
        return hashlib.sha256(f"{_FORMAT} {self._kind}/{path.name}\n".encode() + content).hexdigest()

    def _refusal(self, path: Path) -> str | None:
        """Return why the folders of an entry must not be trusted; None if they are safe or do not exist yet."""
        for folder in (self.folder, self.root, path.parent):
            if folder not in self._safe:
                why = refusal(folder)
                if why is not None:
                    return why
                if folder.exists():
                    self._safe.add(folder)
        return None

    def _unwritable(self, error: OSError) -> str:
        return f"cannot write to {self.root}: {error.strerror}; make room there, or {_ELSEWHERE}"

    def _spare_for(self, problem: str) -> KernelCache:
        if self._spare is None:
            try:
                folder = _folder_of_process(os.getpid())
            except OSError as error:
                raise ConfigError(f"{problem} (nor to a temporary folder: {error.strerror})") from None
            if self.folder not in _warned:
                _warned.add(self.folder)
                warnings.warn(f"{problem}.\nUntil then each process compiles for itself, into {folder}", stacklevel=2)
            self._spare = KernelCache(folder, self._kind)
        return self._spare

    def keep_text(self, name: str, lines: Iterable[str]) -> Path:
        """Write a source or log for people to read, beside the kernels, and return its path."""
        path = self.root / "failed" / name
        try:
            _make_folder(path.parent)
            path.write_text("".join(lines))
        except OSError as error:
            return self._spare_for(self._unwritable(error)).keep_text(name, lines)
        return path


def refusal(folder: Path) -> str | None:
    """Return why code from `folder` must not run, and what to do; None if only this user and root can write there.

    OpenSSH has the same rule for keys. Also None for a folder that does not exist.
    """
    try:
        about = folder.stat()
    except OSError:
        return None
    if not stat.S_ISDIR(about.st_mode) or _own(about):
        return None
    what = f"{folder} holds code that overlapc runs, but"
    if about.st_uid not in (0, os.geteuid()):
        me = f"this process runs as {_user(os.geteuid())}"
        return (
            f"{what} it belongs to {_user(about.st_uid)} and {me}; set OVERLAPC_CACHE_DIR to a folder of your own, or"
            " run as its owner"
        )
    who = "everyone" if about.st_mode & stat.S_IWOTH else f"the group {_group(about.st_gid)}"
    return (
        f"{what} {who} may write to it (mode {stat.S_IMODE(about.st_mode):04o}); if no other user wrote there,"
        f" chmod -R go-w {folder}; else delete it, or set OVERLAPC_CACHE_DIR to a folder of your own"
    )


def _own(about: os.stat_result) -> bool:
    """Whether only this process's user and root can have written the file or folder."""
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH:
        return False
    return not about.st_mode & stat.S_IWGRP or _is_private(about.st_gid, os.geteuid())


@lru_cache(None)
def _is_private(group: int, user: int) -> bool:
    """Whether `user` is the only member of the group, as on systems where each user has a group of the same name."""
    try:
        entry, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return owner.pw_gid == group and entry.gr_name == owner.pw_name and set(entry.gr_mem) <= {owner.pw_name}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _read_own(path: Path) -> bytes | None:
    """Return the content of a regular file that only this user can have written; None for others or unreadable ones."""
    try:
        # Without O_NONBLOCK a named pipe would block. `fstat` checks the same file that is read.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(about.st_mode) and _own(about) else None
    except OSError:
        return None


def _make_folder(folder: Path) -> None:
    """Make the folder and its parents, writable only by the user whatever the umask; remove a file in its place."""
    if folder.is_dir():
        return
    for each in (*reversed(folder.parents), folder):
        if each.is_dir():
            continue
        try:
            each.mkdir(mode=0o755, exist_ok=True)
        except FileExistsError:
            if each != folder:
                raise
            _clear(folder, stat.S_ISDIR)
            each.mkdir(mode=0o755, exist_ok=True)


def _clear(path: Path, expected: Callable[[int], bool] = stat.S_ISREG) -> None:
    """Remove a path of an unexpected kind, such as a loop of symbolic links."""
    try:
        if expected(path.stat().st_mode):
            return
    except OSError:  # a dangling link, or nothing
        if not path.is_symlink():
            return
    _remove(path)


def _remove(path: Path) -> None:
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return  # another process removed it


@lru_cache(None)
def _folder_of_process(number: int) -> Path:
    """Return the temporary folder of this process, for entries that it cannot store in the cache."""
    folder = tempfile.mkdtemp(prefix="overlapc-")

    def remove() -> None:
        if os.getpid() == number:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _write_new(path: Path, content: bytes) -> None:
    """Write a new file that only the user may change, whatever the umask."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(content)


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
