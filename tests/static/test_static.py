"""Style, types and the direction of imports, checked by the tools that know them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("lint-imports",),
        ("basedpyright", "--pythonpath", sys.executable),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_tool_finds_nothing(command):
    found = subprocess.run([TOOLS / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
