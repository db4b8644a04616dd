"""Warm start: reuse what an earlier process compiled, found by a hash of everything it was compiled from.

`fingerprint` and `environment` hash the inputs of a compilation, and `stored` converts plain values to JSON and back.
`cached_graph` stores one compiled graph on disk, `cached_step` a whole step, for which AOTAutograd need not run either.
`loading` makes cached graphs and steps callable; `precompile` does so for a trace that torch stored. `watch` finds out
how to call a step without AOTAutograd's wrapper, also in the process that compiles it.
"""
