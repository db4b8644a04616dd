"""All differences between torch 2.11, 2.12 and 2.13, and all private names of torch that overlapc uses.

Dynamo's tracing is the exception: only `parallel/replayed_blocks.py` uses its names.
"""
