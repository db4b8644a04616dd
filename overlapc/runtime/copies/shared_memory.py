"""Memory of each rank that all ranks of a group on one host map: symmetric memory on GPUs, a shared file on CPUs.

`offer` allocates, which may fail on some ranks only. Once all ranks have allocated, they exchange `Offer.text`, and
`Offer.joined` maps the memory of the other ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlapc.errors import NoSharedMemory
from overlapc.runtime.copies.commands import HEAD_BYTES, MappedMemories

FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


@dataclass(frozen=True)
class Memory:
    """The mapped memories of a group; they stay mapped as long as this object lives."""

    own: Tensor  # this rank's memory, as bytes
    places: MappedMemories
    held: Sequence[Any] = field(repr=False, default=())  # the objects that keep memory mapped

    @property
    def bytes(self) -> int:
        return self.own.numel()


class SharedOffer:
    """A file in memory, for ranks on CPUs. Its name is removed as soon as all ranks have mapped it."""

    def __init__(self, size_bytes: int) -> None:
        handle, name = tempfile.mkstemp(prefix="overlapc-copies-", dir=FOLDER)
        self._path = Path(name)
        try:
            os.posix_fallocate(handle, 0, size_bytes)  # else a full /dev/shm kills the process at the first write
            self._bytes = mmap.mmap(handle, size_bytes)
            self._own = _cleared(torch.frombuffer(self._bytes, dtype=torch.uint8))
        except OSError:
            self.withdraw()
            raise
        finally:
            os.close(handle)
        self.text = name

    def joined(self, rank: int, texts: Sequence[str], group: str) -> Memory:
        """Map the files of the group's ranks; `texts` are their offers in order of rank."""
        mapped = []
        for at, text in enumerate(texts):
            if at == rank:
                mapped.append(self._bytes)
                continue
            with open(text, "r+b") as file:
                mapped.append(mmap.mmap(file.fileno(), len(self._bytes)))
        bases = tuple(ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in mapped)
        return Memory(self._own, MappedMemories(rank, bases), tuple(mapped))

    def withdraw(self) -> None:
        """Remove the file's name: all ranks have mapped it, or none will."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class SymmetricOffer:
    """torch's symmetric memory, for ranks on GPUs that can reach each other."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self._own = _cleared(symmetric.empty(size_bytes, dtype=torch.uint8, device=device))
        self.text = ""

    def joined(self, rank: int, texts: Sequence[str], group: str) -> Memory:
        """Exchange handles with all ranks of the group (a rendezvous) and map their memory."""
        from torch.distributed import _symmetric_memory as symmetric

        handle: Any = symmetric.rendezvous(self._own, group)  # type: ignore[arg-type]  # its stub wants a NewType
        bases = tuple(int(address) for address in handle.buffer_ptrs)
        assert bases[rank] == self._own.data_ptr(), "symmetric memory begins where its tensor does"
        return Memory(self._own, MappedMemories(rank, bases), (handle,))

    def withdraw(self) -> None:
        """Do nothing: the memory has no name."""


def _cleared(memory: Tensor) -> Tensor:
    """Set the flags in `memory` to 0 and return it. RuntimeError if that has no effect: peers would wait forever."""
    if bool(memory[:HEAD_BYTES].zero_().any()):  # also waits for the device
        raise RuntimeError("flags were not set to zero")
    return memory


Offer = SharedOffer | SymmetricOffer


def offer(size_bytes: int, device: torch.device) -> Offer:
    """Allocate memory of this rank, with its flags at 0; raise NoSharedMemory if that fails."""
    try:
        return SharedOffer(size_bytes) if device.type == "cpu" else SymmetricOffer(size_bytes, device)
    except (OSError, RuntimeError) as error:
        where = f"in {FOLDER}" if device.type == "cpu" else f"on {device}"
        raise NoSharedMemory(
            f"cannot allocate {size_bytes} bytes {where} to share with other ranks: {error}"
            '\nhint: options={"transport": "nccl"} needs no shared memory; smaller units of fully_shard need less'
        ) from error
