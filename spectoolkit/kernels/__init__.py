"""Triton kernels of what decoding and replay read whole vocabularies for; the mathematics is that of `functional`.

The loop knows `judge` and the replay `replay_reduction`, which take a kernel or the reference, as `switch` says; nobody
else knows of the kernels. `rejection_and_block`, `coupled`, `reduce`, `rows` and `noise` import triton, so nothing
imports them before a kernel is needed. `launch` has the rules by which work is cut, `verdict` what rules write.

Every kernel cuts the rows into chunks of the vocabulary, a program for each, whose partial results are combined in a
fixed order in float64: a row's result depends on the row alone, never on its batch.
"""
