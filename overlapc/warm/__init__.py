"""Warm start: finds what an earlier process compiled, by a hash of everything it was compiled from.

`fingerprint` and `environment` say what a graph is compiled from, `stored` turns plain values into JSON and back,
`cached_graph` keeps one compiled graph on disk, `cached_step` a whole step, so that AOTAutograd is not asked either.
`loading` makes callable what was found, `precompile` does so behind a trace that torch kept. `watch` finds out how a
step is called without AOTAutograd's wrapper, in the process that compiles it too.
"""
