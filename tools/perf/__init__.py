"""Speed of our parts against a naive version or a peer, measured in one process.

A time means nothing on a shared machine, so every number here is a ratio of two things that ran in
turns, and beside it stand counts that are the same everywhere: forwards, operator calls, FLOPs,
bytes kept for the backward pass.  ``python -m tools.perf``.
"""
