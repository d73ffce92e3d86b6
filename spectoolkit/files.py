"""Files that appear complete or not at all, also with several writers at once; where the configs are."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spectoolkit.errors import RunError


def config_folder() -> Path:
    """The folder of the YAML files: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


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
