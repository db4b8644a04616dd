"""Kernels measured on this device (`autotune`): each kernel of a graph in a few block sizes, with times stored on disk.

    tuning = tune(schedule, graph, weigh, cache_dir, seconds=60, agreement=agreement)
    sources = generate_kernels(schedule, graph, tuning.sources)      # the fastest of each
    tuning.estimate(node)                                            # and what it took

search.py says which tilings come next, timing.py runs them, kept.py keeps their times, tuning.py puts that together.
Before there is a schedule, product_choice.py times matrix products against the library, and fusions.py times kernels
that may fuse.
"""

from overlapc.autotune.tuning import Choice, Tuning, tune

__all__ = ["Choice", "Tuning", "tune"]
