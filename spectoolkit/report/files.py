"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], object]) -> Path:
    """Have `write` fill a temporary file beside `path`, then rename it over `path`; a failure leaves `path` as it was.

    The temporary name keeps the suffix, since writers choose their format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def replace_text(path: Path, text: str) -> Path:
    """`replace` with UTF-8 text and Unix line ends."""
    return replace(path, lambda temporary: temporary.write_bytes(text.encode("utf-8")))
