"""All options of overlapc: their types, defaults, environment variables and meanings.

An option can be set in three ways:

    torch.compile(model, backend="overlapc", options={"memory_budget": "70GiB"})
    torch.compile(model, backend="overlapc", options=overlapc.Config(memory_budget="70GiB"))
    OVERLAPC_MEMORY_BUDGET=70GiB torchrun train.py

`options` override variables. Variables are read when a graph is compiled, never at import.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from overlapc.errors import ConfigError, shown, unknown_name
from overlapc.options import option_values as read

STAGES = ("fx", "ir", "fusion", "passes", "program", "kernels", "all")  # of a compilation; values of `dump`
# Options that do not change the generated code (where files are, how long to wait for other ranks, what to print): they
# are not part of cache keys.
NOT_IN_KEY = frozenset({"rank_timeout", "dump_dir", "cache_dir", "dump", "debug", "warm_start"})


def _knob(default: Any, reader: Callable[[Any], Any], meaning: str) -> Any:
    return field(default=default, metadata={"read": reader, "help": meaning})


@dataclass(frozen=True, init=False)
class Config:
    """The options of one compilation, converted to their types by the functions of `option_values`.

    Unknown names and invalid values raise ConfigError. Only `Config.of` reads the `OVERLAPC_<NAME>` variables of the
    options that are not given.
    """

    memory_budget: int | None = _knob(
        None,
        read.optional_bytes,
        "limit on the peak memory of the compiled graphs, without optimizer state, e.g. 70GiB (default: no limit)",
    )
    # A quarter: prefetching one layer and keeping one unreduced gradient took 13% on a Llama-8B shape of 8 layers
    # (7.9 GiB with FSDP2, 7.0 in program order), more on shallower models; 0% would forbid any prefetch.
    peak_increase: float = _knob(
        0.25,
        read.fraction,
        "without a memory_budget: how far passes may raise peak memory, as a fraction of the peak before passes",
    )
    keep_gathered: bool = _knob(
        True,
        read.a_bool,
        "with a memory_budget: keep parameters gathered between forward and backward if memory is left within the"
        " budget and the planned step becomes shorter; first those whose second all-gather costs the most time per"
        " byte",
    )
    reorder_collectives: bool = _knob(
        True,
        read.a_bool,
        "let an all-gather move ahead of an independent reduce-scatter of the same process group, which prefetching in"
        " backward needs",
    )
    safe_communication: frozenset[str] = _knob(
        frozenset(),
        read.words,
        "custom ops (namespace::name,...) that communicate, but that other collectives may be moved across; every other"
        " op whose communication overlapc does not know is a barrier for all collectives",
    )
    # NCCL kernels took 1.2 to 1.7 times as long beside compute as alone in steps of a Llama-8B shape on 4 H200s (37 ms;
    # 43 to 63 overlapped). The simulator expects the average of that, but a late collective stops all ranks, so it gets
    # half of its time again.
    overlap_margin: float = _knob(
        1.5,
        read.margin,
        "start collectives early enough to stay hidden even if they take this many times their estimated time",
    )
    search_effort: int = _knob(
        60_000,
        read.count,
        "how many orders of a graph the schedule search may simulate, about 0.001 ms each; fewer make compiling faster",
    )
    passes: tuple[str | Callable[..., Any], ...] | None = _knob(
        None,
        read.pass_names,
        "passes to run, in this order, by name or as package.module:function; 'none' runs none (default:"
        " passes/pipeline.py)",
    )
    stop_after: str | None = _knob(
        None,
        read.optional_text,
        "the last pass to run: PASS, or PASS:N for only the first N of its moves (for bisection)",
    )
    profile: str | None = _knob(
        None,
        read.name_or_file,
        "device profile for estimates: a name or a JSON file (default: this machine's)",
    )
    estimates: str | Callable[..., Any] | None = _knob(
        None,
        read.file_or_function,
        "times that override all other estimates: a measured record.json, a trace of an earlier run, or a function of "
        "a node that returns ns or None (the same file or function on all ranks)",
    )
    measure_matmuls: bool | None = _knob(
        None,
        read.optional_bool,
        "measure library calls (matmuls, and also attention and convolutions) once per shape on this device, and cache"
        " the times (default: on GPUs, for graphs that communicate, unless a profile is named; never with deterministic"
        " algorithms)",
    )
    transport: str = _knob(
        "auto",
        read.one_of("auto", "nccl", "copy"),
        "how parameters and gradients are communicated: nccl is the process group's library (NCCL, or gloo on CPUs),"
        " which reports call `library`; copy is peer-to-peer copies between ranks of one host, with gradients sent in"
        " the dtype they were computed in and summed in float32; auto uses copies where the profile predicts them to be"
        " faster",
    )
    ranks_per_host: int | None = _knob(
        None,
        read.optional_count,
        "how many consecutive ranks share a host and exchange data by copies (default: the ranks that are on one host);"
        " with it, or with transport=copy, a process group that spans several hosts uses copies within each host and"
        " the library between hosts",
    )
    rank_timeout: float = _knob(300.0, read.seconds, "seconds to wait for other ranks while compiling")
    rank_check: bool = _knob(True, read.a_bool, "compare graphs and collective orders between ranks")
    fusion: bool = _knob(True, read.a_bool, "fuse generated kernels")
    benchmark_fusion: bool = _knob(
        False,
        read.a_bool,
        "keep a fusion only if its kernel, timed while compiling, is faster than both kernels alone and spills no "
        "registers; slow; not in graphs that communicate, and never with deterministic algorithms",
    )
    autotune: bool = _knob(
        False,
        read.a_bool,
        "measure each generated Triton kernel with a few block sizes while compiling, use the fastest, and cache the"
        " times in cache_dir; may change the order of summation; never with deterministic algorithms",
    )
    autotune_seconds: float = _knob(
        60.0, read.seconds, "limit on the seconds that each rank spends on autotune for a graph"
    )
    trace_once: bool = _knob(
        True,
        read.a_bool,
        "trace equal members of a list of modules (the layers of a model) once, and lower and fuse equal layers once;"
        " off does so for every layer, with the same result",
    )
    native: bool = _knob(True, read.a_bool, "generate kernels; off calls torch's own op for every node (for bisection)")
    matmul: str = _knob(
        "library",
        read.one_of("library", "autotune", "native"),
        "how matrix products are computed: by library calls (library), by generated kernels with neighbouring ops fused"
        " in (native), or by whichever is measured to be faster on this GPU (autotune)",
    )
    numerics: str = _knob(
        "eager",
        read.one_of("eager", "fast"),
        "float16 and bfloat16 values between the ops of a generated kernel: rounded after each op, as eager does "
        "(eager), or kept in float32 and rounded only where they are stored, compared or sorted (fast)",
    )
    fallback_random: bool = _knob(
        False,
        read.a_bool,
        "draw the same random numbers as eager, with torch's own ops (default: generated kernels draw other numbers)",
    )
    check_memory: bool = _knob(
        False,
        read.a_bool,
        "after every move of a pass, recompute live memory from scratch and compare (slow; for debugging)",
    )
    deterministic: bool = _knob(
        False,
        read.a_bool,
        "same schedule and same bits in every run: nothing is measured on this machine, no atomics (also on while "
        "torch.use_deterministic_algorithms is on)",
    )
    memory: str = _knob(
        "reuse",
        read.one_of("reuse", "pool"),
        "how buffers of a graph get memory: each is allocated by itself and reused (reuse), or all share one allocation"
        " (pool)",
    )
    cuda_graphs: bool = _knob(
        False,
        read.a_bool,
        "replay the parts of a graph that can be captured as CUDA graphs: less host time for models of many small "
        "kernels; results are copied out, inputs at changing addresses are copied in",
    )
    check_lifecycle: bool = _knob(
        False,
        read.a_bool,
        "fail with a buffer's name if memory is not used as planned, or changes while a collective reads it; slow",
    )
    check_values: frozenset[str] = _knob(
        frozenset(),
        read.subset_of("kind of value", "nan", "inf"),
        "fail with a kernel's name and source line if the kernel writes one of these: nan,inf; slow",
    )
    sync_kernels: bool = _knob(
        False,
        read.a_bool,
        "wait for the device after every kernel and call, so that an error names the kernel that failed; slow",
    )
    wrapper: str = _knob(
        "python",
        read.one_of("python", "fx"),
        "what runs a compiled graph: a generated Python function, or a torch.fx.GraphModule of the same instructions",
    )
    verify: bool = _knob(True, read.a_bool, "check the schedule after every pass")
    dump: frozenset[str] = _knob(
        frozenset(), read.subset_of("stage", *STAGES), f"stages to write as text: {', '.join(STAGES)}"
    )
    debug: frozenset[str] = _knob(
        frozenset(),
        read.subset_of("stage", *STAGES),
        "stages to print to stderr, with the same names as for dump: debug=fusion says why kernels were not fused",
    )
    dump_dir: Path = _knob(Path("overlapc_dump"), read.path, "folder for dumps")
    warm_start: bool = _knob(
        True, read.a_bool, "store compiled graphs in cache_dir and load them from there; off compiles every graph again"
    )
    cache_dir: Path = _knob(
        Path("~/.cache/overlapc"),
        read.path,
        "folder for compiled kernels, graphs and measurements; not used if other users own it or may write to it",
    )

    _given: ClassVar[frozenset[str]]  # names that `__init__` was given; ClassVar keeps it from being an option

    def __init__(self, **options: Any) -> None:
        known = {knob.name: knob for knob in dataclasses.fields(self)}
        for name in options:
            if name not in known:
                raise ConfigError(unknown_name("option", str(name), known))
        object.__setattr__(self, "_given", frozenset(options))
        for name, knob in known.items():
            object.__setattr__(self, name, _read(knob, options.get(name, knob.default), name))
        self._check_together()

    def _check_together(self) -> None:
        """Raise ConfigError for options that exclude each other."""
        if self.memory == "pool" and self.wrapper == "fx":
            raise ConfigError("memory='pool' needs wrapper='python': wrapper='fx' allocates each buffer by itself")
        if self.cuda_graphs:
            self._check_cuda_graphs()
        if self.autotune and self.autotune_seconds >= self.rank_timeout:
            raise ConfigError(
                f"autotune_seconds={self.autotune_seconds:g} is not less than rank_timeout ({self.rank_timeout:g} s):"
                " other ranks would time out while one is still measuring; raise rank_timeout, too"
            )

    def _check_cuda_graphs(self) -> None:
        if self.wrapper == "fx":
            raise ConfigError("cuda_graphs needs wrapper='python': the FX wrapper cannot run captured parts")
        if self.memory == "pool":
            raise ConfigError(
                "cuda_graphs needs memory='reuse': captured parts allocate from the CUDA graphs' own pool"
            )
        checks = [name for name in ("check_lifecycle", "check_values", "sync_kernels") if getattr(self, name)]
        if checks:
            raise ConfigError(
                f"{checks[0]} cannot be combined with cuda_graphs: a captured part runs as a whole, so its nodes cannot"
                " be checked one by one"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | Config | None = None, mode: str | None = None) -> Config:
        """Return the config with each option from `options`, else its variable, else `mode`, else its default.

        An empty variable counts as unset.
        """
        if mode is not None and mode not in MODES:
            raise ConfigError(unknown_name("mode", str(mode), MODES))
        if isinstance(options, Config):
            given = options.given
        elif isinstance(options, Mapping) or options is None:
            given = dict(options or {})
        else:
            raise ConfigError(f"options={shown(options)}: write a dict, or overlapc.Config(...)")
        known = {knob.name: knob for knob in dataclasses.fields(cls)}
        _warn_of_unknown_variables(known)
        for name in known:
            variable = variable_of(name)
            if name not in given and os.environ.get(variable):
                given[name] = _read(known[name], os.environ[variable], variable)
        return cls(**{**MODES[mode or "default"], **given})

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given explicitly; `of` takes the others from variables and a mode."""
        return {name: getattr(self, name) for name in self._given}

    @property
    def checks(self) -> frozenset[str]:
        """The checks that the wrapper makes after each node: of "nan", "inf" and "sync"."""
        return self.check_values | ({"sync"} if self.sync_kernels else frozenset())

    def wants_dump(self, stage: str) -> bool:
        """Whether `stage` is to be written as text."""
        return stage in self.dump or "all" in self.dump

    def wants_debug(self, stage: str) -> bool:
        """Whether `stage` is to be printed."""
        return stage in self.debug or "all" in self.debug


# The options that each `torch.compile(mode=…)` sets, so that a script need only change the name of its backend.
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"autotune": True, "matmul": "autotune"},
    "max-autotune": {"autotune": True, "matmul": "autotune", "cuda_graphs": True},
}


def variable_of(name: str) -> str:
    """Return the environment variable of an option: `rank_timeout` -> `OVERLAPC_RANK_TIMEOUT`."""
    return "OVERLAPC_" + name.upper()


# Variables with our prefix that are not options: launch.torchrun sets the first for its ranks, tests read the second.
_OTHER_VARIABLES = ("OVERLAPC_RUN_DIR", "OVERLAPC_TEST_SEED")


def _warn_of_unknown_variables(options: Iterable[str]) -> None:
    """Warn about variables that no option reads: a misspelt name would silently have no effect."""
    known = {*map(variable_of, options), *_OTHER_VARIABLES}
    for variable in os.environ:
        if variable.startswith("OVERLAPC_") and variable not in known:
            warnings.warn(f"{unknown_name('variable', variable, known)}; it is ignored", stacklevel=2)


def describe() -> list[tuple[str, str, str, str]]:
    """Return (option, variable, default, meaning) of every option, for help texts and docs."""
    return [
        (knob.name, variable_of(knob.name), str(knob.default), knob.metadata["help"])
        for knob in dataclasses.fields(Config)
    ]


def _read(knob: dataclasses.Field[Any], value: Any, shown_as: str) -> Any:
    try:
        return knob.metadata["read"](value)
    except ConfigError as error:
        raise ConfigError(f"{shown_as}: {error}") from None
