"""Where kernels run, and where the reference does the work: what verification and a replay's reduction both ask.

With `SPECTOOLKIT_KERNELS=auto`, which holds where nothing is said, kernels run on CUDA tensors where triton is
installed, for the plain rows that most work is made of: logits in float32, float16 or bfloat16, no filter, penalty or
bias, and a rule and law that `judge` or `replay_reduction` has a kernel for. Everything else, and every batch with
something to report (NaN, a broken contract), goes through the reference, whose errors count. Top-k, top-p and min-p
rows do too: they are sorted there, and a kernel would have to break ties exactly so.

Before a device's first kernel `self_check` compares all of them with the reference there; where they differ or fail,
one warning says so and the process keeps to the reference on this device. It is not asked, and no kernel is compiled,
for work that has none. What was done is noted as it is done, and `provenance` says it.

`off` is the reference everywhere. `interpret` takes kernels for CPU tensors as well, through Triton's interpreter (with
TRITON_INTERPRET=1), which is for tests.

A verdict or a number of a kernel is the reference's up to rounding, as those of another device or another number of
threads are. Like these, kernels are no part of a cell's identity: a folder begun on one machine is finished on another,
and every cell's provenance says what computed it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from spectoolkit.errors import UsageError
from spectoolkit.functional.warp import Penalties
from spectoolkit.provenance import note
from spectoolkit.sampling import SamplingState

SWITCH = "SPECTOOLKIT_KERNELS"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def parse_switch() -> str:
    """What SPECTOOLKIT_KERNELS says; a run asks before its first forward.

    Raises:
        UsageError: it is something else than auto, off or interpret.
    """
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "off", "interpret"):
        raise UsageError(f"{SWITCH}: expected auto, off or interpret, got {switch!r}")
    return switch


def reason_for_reference(device: torch.device) -> str:
    """Why no kernel runs on this device, "" if they do; the first time there they have to pass its `self_check`.

    Raises:
        UsageError: see `parse_switch`.
    """
    switch = parse_switch()
    if switch == "off":
        return f"reference, because {SWITCH}=off"
    if device.type != "cuda" and switch != "interpret":
        return "reference, because it is no CUDA device"
    if find_spec("triton") is None:
        return "reference, because triton is not installed"
    from spectoolkit.kernels.self_check import failure

    found = failure(device)
    return f"reference, because the self-check failed: {found}" if found else ""


def is_plain(sampling: SamplingState) -> bool:
    """Whether rows are softmax(logits / T) alone."""
    filters = (sampling.params.top_k, sampling.params.top_p, sampling.params.min_p)
    return all(values is None for values in filters) and not _changes_logits(sampling.penalties)


def _changes_logits(penalties: Penalties | None) -> bool:
    if penalties is None:
        return False
    columns = (penalties.repetition, penalties.frequency, penalties.presence, penalties.bias_rows)
    return any(values is not None for values in columns)


def note_kernels(device: torch.device, what: str) -> None:
    """Have the provenance say by what logits on `device` were judged or reduced."""
    note("kernels", f"{device}: {what}")
