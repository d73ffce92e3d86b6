"""spectoolkit: measure what each choice in speculative decoding costs.

For notebooks: `plan` composes a study, `read_tables` reads a recorded one, `register` adds a drafter or verifier.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectoolkit.config import plan, register
    from spectoolkit.report.tables import read as read_tables

__version__ = "0.1.0"
__all__ = ["plan", "read_tables", "register"]

_HOMES = {
    "plan": ("spectoolkit.config", "plan"),
    "register": ("spectoolkit.config", "register"),
    "read_tables": ("spectoolkit.report.tables", "read"),
}


def __getattr__(name: str) -> Any:
    """Imported when first asked for: who uses one part of the toolkit does not wait for all of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
