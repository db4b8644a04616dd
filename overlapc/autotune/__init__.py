"""Measures each kernel of a graph in a few block sizes on this device (`autotune`), and caches the times on disk.

    tuning = tune(schedule, graph, weigh, cache_dir, seconds=60, agreement=agreement)
    sources = generate_kernels(schedule, Sources(graph, tuning.sources))      # the fastest source of each kernel
    tuning.estimate(node)                                            # the measured time of a kernel

search.py chooses the tilings to try next, timing.py runs them, cached_times.py stores their times, tuning.py combines
these. Before there is a schedule, product_choice.py compares matrix products with library calls, and fusions.py times
kernels that may be fused.
"""

from overlapc.autotune.tuning import Choice, Tuning, tune

__all__ = ["Choice", "Tuning", "tune"]
