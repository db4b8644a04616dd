"""Block sizes by measurement (`autotune`): each kernel of a graph in a few tilings, timed here, kept on disk.

    tuning = tune(schedule, graph, weigh, cache_dir, seconds=60, talks=talks)
    sources = generate_kernels(schedule, graph, tuning.sources)      # the fastest of each
    tuning.estimate(node)                                            # and what it took

search.py says which tilings come next, timing.py runs them, kept.py keeps their times, tuning.py puts that together.
"""

from overlapc.autotune.tuning import Choice, Tuning, tune

__all__ = ["Choice", "Tuning", "tune"]
