"""How a number was made: versions, commit, machine, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import spectoolkit

PACKAGES = ("torch", "transformers", "numpy", "pandas", "hydra-core", "triton")

_kernels: dict[str, str] = {}
"""Device -> what `kernels.dispatch` last said of it."""


def provenance() -> dict[str, Any]:
    """Versions, git commit of the code (None outside a checkout), device, command line and time (UTC).

    "cuda" is the version that torch was built for (None for a CPU's); "kernels" says for each device whether kernels or
    the reference computed there so far, and why.
    """
    return {
        "spectoolkit": spectoolkit.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "device": device_name(),
        "kernels": "; ".join(f"{device}: {what}" for device, what in _kernels.items()) or "not asked for",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def say_kernels(device: str, what: str) -> None:
    """Have `provenance` say `what` of the kernels on a device: known only once a run got there."""
    _kernels[device] = what


def device_name() -> str:
    """The GPU's name, or the processor's with the number of threads that torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it."""
    folder = Path(__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None
