"""Warm start: what an earlier process compiled, found again by what it was compiled from.

`fingerprint` and `environment` say what a graph is compiled from, `stored` turns plain values into JSON and back,
`graph` keeps one compiled graph (wrapper, kernels, record), `step` keeps a whole step, so that AOTAutograd is not asked
either. `watch` finds out how a step is called without AOTAutograd's wrapper, in the process that compiles it too.
"""
