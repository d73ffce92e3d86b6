"""Every kernel compiles for a GPU on a machine without one: what the interpreter lets pass, a compiler may not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

EXPECTED = {
    "_row_parts", "_decide", "_residual_masses", "_longest_prefix", "_pick", "_coupled_parts", "_coupled_verdict",
    "_pair_parts", "_pair_sums",
    "_uniforms", "_exponentials",
}  # fmt: skip


def test_every_kernel_compiles(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_kernels", "90"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert set(sizes) == EXPECTED
    assert all(int(size) > 0 for size in sizes.values())
