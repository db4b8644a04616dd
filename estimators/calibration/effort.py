"""The sizes of the workloads that `overlapc calibrate` and the first compilation for a CPU measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from overlapc.schedule.collective_kinds import NAMES

MEASURING_S = 120.0  # time limit for measuring a CPU on first use
MIB = 2**20
_LLAMA_LAYER = (4096, 16 * MIB, 4 * MIB, 4 * MIB, 16 * MIB, 4096, 56 * MIB, 56 * MIB, 56 * MIB)  # elements, 8B shape


@dataclass(frozen=True)
class AttentionShape:
    """Causal attention with `heads` query heads that share `kv_heads` key and value heads."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    width: int

    @property
    def flops(self) -> int:
        """FLOPs of the forward as the estimators count them, which is without the causal mask."""
        return 4 * self.batch * self.heads * self.seq * self.seq * self.width


@dataclass(frozen=True)
class Effort:
    """The sizes to measure."""

    matmuls: Mapping[str, Sequence[tuple[int, int, int]]]  # dtype -> (rows, inner, columns)
    copy_bytes: int
    collectives: Sequence[str]
    collective_bytes: Sequence[int]
    collective_dtypes: Sequence[str]
    beside_bytes: int  # of collectives and copies that are measured with overlap
    beside_matmul: tuple[int, int, int]
    attention: Mapping[str, Sequence[AttentionShape]] = field(default_factory=dict)
    # On a GPU contention depends on how a matmul's tiles fill the device: shapes with one, few and many waves.
    beside_matmuls: Sequence[tuple[int, int, int]] = ()
    beside_moved: Sequence[int] = ()  # bytes that memory-bound kernels read and write
    beside_attention: AttentionShape | None = None
    channels: Sequence[int] = ()  # process groups with these numbers of channels are measured, too
    layer: Sequence[int] = ()  # elements of the tensors that a coalesced collective moves
    generated_bytes: Sequence[int] = ()  # read and written by a generated kernel
    # Duration of the matmuls that run right before each measured matmul and attention: an H200 reached 814 TFLOP/s in
    # short bursts, 740 under the load of a training step, 712 back to back.
    load_s: float = 0.0
    burst_matmuls: Sequence[tuple[int, int, int]] = ()  # also measured in short bursts, in bf16
    layer_matmuls: Sequence[tuple[int, int, int]] = ()  # of a transformer layer, in bf16
    pause_fractions: Sequence[float] = ()  # pauses after such a layer, as fractions of the layer's time
    pause_collective_bytes: int = 0  # of each of the two collectives in such a pause

    @classmethod
    def quick(cls) -> Effort:
        """Return sizes for the automatic measurement at the first compilation for a CPU, ten seconds on two cores."""
        return cls(
            matmuls={"fp32": [(512, 512, 512)], "bf16": [(512, 512, 512)]},
            copy_bytes=32 * MIB,
            collectives=("all_gather", "reduce_scatter", "all_reduce"),
            collective_bytes=[2**16, 2**18, MIB, 4 * MIB, 16 * MIB],
            collective_dtypes=("fp32",),
            beside_bytes=16 * MIB,
            beside_matmul=(256, 256, 256),
        )

    @classmethod
    def cpu(cls) -> Effort:
        """Return the sizes that `overlapc calibrate` measures on a CPU."""
        squares = [(size, size, size) for size in (64, 128, 256, 512, 1024)]
        return cls(
            matmuls={"fp32": squares, "bf16": squares},
            attention={"fp32": [AttentionShape(1, 4, 2, seq, 64) for seq in (128, 512)]},
            copy_bytes=32 * MIB,
            collectives=NAMES,
            collective_bytes=[2**16, 2**18, MIB, 4 * MIB, 16 * MIB],
            collective_dtypes=("fp32",),
            beside_bytes=16 * MIB,
            beside_matmul=(256, 256, 256),
            layer=[size // 64 for size in _LLAMA_LAYER],
            generated_bytes=[2**16, MIB, 16 * MIB],
        )

    @classmethod
    def gpu(cls) -> Effort:
        """Return the sizes that `overlapc calibrate` measures on a GPU: transformers up to Llama-8B and above."""
        bf16 = [(size, size, size) for size in (256, 512, 1024, 2048)]
        for rows in (1024, 4096):
            bf16 += [(rows, 4096, 1024), (rows, 4096, 4096), (rows, 4096, 14336), (rows, 14336, 4096)]
        bf16 += [(4096, 4096, 32000), (8192, 4096, 14336)]
        return cls(
            matmuls={"bf16": bf16, "fp32": [(size, size, size) for size in (512, 1024, 2048, 4096)]},
            attention={"bf16": [AttentionShape(1, 32, 8, seq, 128) for seq in (512, 1024, 2048, 4096, 8192)]},
            copy_bytes=1024 * MIB,
            collectives=NAMES,
            collective_bytes=[2**power for power in range(16, 31, 2)],
            collective_dtypes=("bf16", "fp32"),
            # Longer than the overlapping compute, because a collective issued during a kernel waits for its last wave.
            beside_bytes=2048 * MIB,
            beside_matmul=(8192, 4096, 14336),
            beside_matmuls=[(4096, 4096, columns) for columns in (1024, 2048, 4096, 7168, 14336, 32768)],
            beside_moved=[8 * MIB, 32 * MIB, 96 * MIB, 512 * MIB],
            beside_attention=AttentionShape(1, 32, 8, 4096, 128),
            channels=(16, 8, 4),
            layer=_LLAMA_LAYER,
            generated_bytes=[2**power for power in range(18, 31, 3)],
            load_s=0.25,
            burst_matmuls=[(4096, 4096, columns) for columns in (512, 1024, 4096, 14336, 32000)],
            layer_matmuls=[(4096, 4096, columns) for columns in (4096, 1024, 1024, 4096, 14336, 14336)]
            + [(4096, 14336, 4096)],
            pause_fractions=[0.0, 0.15, 0.3, 0.5],
            pause_collective_bytes=256 * MIB,
        )
