"""Files that appear complete or not at all, also with several writers at once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spectoolkit.errors import RunError


def replace(path: Path, write: Callable[[Path], object]) -> Path:
    """Have `write` fill a temporary file beside `path`, then rename it over `path`; a failure leaves `path` as it was.

    The temporary name keeps the suffix, since writers choose their format by it.

    Raises:
        RunError: the file cannot be written (disk full, no permission).
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp{path.suffix}")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def replace_text(path: Path, text: str) -> Path:
    """`replace` with UTF-8 text and Unix line ends."""
    return replace(path, lambda temporary: temporary.write_bytes(text.encode("utf-8")))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure of the file system into a message that names `path`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error} (finished cells are kept)") from error
