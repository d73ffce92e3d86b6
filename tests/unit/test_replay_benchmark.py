"""The benchmark's measure of memory sees what a process uses, and forgets it."""

import math

import pytest
import torch

from spectoolkit.studies.replay_benchmark import forget_peak, peak_mib


@pytest.mark.skipif(math.isnan(peak_mib()), reason="the system does not tell")
def test_the_peak_is_seen_and_forgotten():
    forget_peak()
    before = peak_mib()
    torch.ones(64 * 2**20, dtype=torch.float32).sum()  # 256 MiB
    grown = peak_mib()
    assert grown - before > 200
    forget_peak()
    assert peak_mib() < grown - 200
