"""Faults that were shipped in speculative decoding elsewhere, as small inputs with the right answer.

Every test is one fault: its number, the numbers of a small case, and the public report where there is one. Where the
wrong answer takes two lines, the test produces it as well, to show that it tells the two apart. The cases run the real
rules, drafters, warp, loop and metrics; the general tests of the same things are in `tests/unit` and `tests/e2e`.

1-10 `test_distribution`, 11-15 `test_numerics`, 16-20 `test_requests`, 21-23 and 31-33 `test_drafters`, 24-30 and 34-36
`test_cache_and_metrics`.
"""
