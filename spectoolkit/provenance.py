"""How a number was made: versions, commit, machine, command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import spectoolkit

PACKAGES = ("torch", "transformers", "numpy", "pandas", "hydra-core", "triton")

NUM = "<num>"
"""Stands in what is noted for how often it was."""

_UNSAID = {"kernels": "not asked for", "graphs": "no model that has any"}

_of_process: dict[str, Counter[str]] = {about: Counter() for about in _UNSAID}
_of_cell: dict[str, Counter[str]] = {about: Counter() for about in _UNSAID}


def provenance(*, of_cell: bool = False) -> dict[str, Any]:
    """Versions, git commit of the code (None outside a checkout), device, command line and time (UTC).

    "cuda" is the version that torch was built for (None for a CPU's). "kernels" says for each device what kernels and
    what the reference computed there, "graphs" of each model how its forward passes were made: of all that this process
    did, or, `of_cell`, since `begin_cell`.
    """
    noted = _of_cell if of_cell else _of_process
    done = {
        about: "; ".join(what.replace(NUM, str(num)) for what, num in dict(noted[about]).items()) or unsaid
        for about, unsaid in _UNSAID.items()
    }
    return {
        "spectoolkit": spectoolkit.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "device": device_name(),
        **done,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def note(about: str, what: str, num: int = 1) -> None:
    """Have `provenance` say `what` of "kernels" or "graphs", as it is done: `num` times more."""
    for noted in (_of_process, _of_cell):
        noted[about][what] += num


def begin_cell() -> None:
    """What is noted from now on belongs to another cell."""
    for noted in _of_cell.values():
        noted.clear()


def device_name() -> str:
    """The GPU's name, or the processor's with the number of threads that torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    num_threads = torch.get_num_threads()
    return f"{_processor()}, {num_threads} {'thread' if num_threads == 1 else 'threads'}"


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
