"""A progress bar with the time left, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(total: int | None, unit: str) -> Iterator[tqdm]:
    """A bar over `total` units (None: not known yet); no bar where there is nothing to do or no terminal."""
    with tqdm(total=total, unit=unit, dynamic_ncols=True, smoothing=0.05, disable=True if total == 0 else None) as bar:
        yield bar
