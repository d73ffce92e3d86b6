"""Lines of a log, compressed or not, and what identifies it."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from spectoolkit.errors import UsageError

_GZIP = b"\x1f\x8b"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?"  # SGLang, containers
    r"|(?<!\d)\d\d-\d\d \d\d:\d\d:\d\d"  # vLLM: month and day
    r"|(?<![\d.])\d+\.\d\d\.\d{3}\.\d{3}(?=\s)"  # llama.cpp: minutes, seconds, ms, µs since its start
)


class Source:
    """A log file; iterating over it gives its lines, line ends included, without colours.

    Attributes:
        path: of the file.
        sha256: of its bytes.
        num_lines: read so far.
        is_cut: whether a gzip file was found to end too early; known once its lines were read.

    Raises:
        UsageError: a file that cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.num_lines = 0
        self.is_cut = False
        try:
            with self.path.open("rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                self._is_compressed = file.read(2) == _GZIP
        except OSError as error:
            raise UsageError(f"log: expected a readable file, got {path} ({error.strerror or error})") from error

    def __iter__(self) -> Iterator[str]:
        with gzip.open(self.path) if self._is_compressed else self.path.open("rb") as file:
            try:
                for line in file:
                    self.num_lines += 1
                    yield _COLOUR.sub("", line.decode("utf-8", errors="replace").replace("\r", ""))
            except EOFError:
                self.is_cut = True  # still being compressed, or copied in part: what is there counts
            except (gzip.BadGzipFile, zlib.error) as error:
                raise UsageError(f"log: expected an intact gzip file, got {self.path} ({error})") from error


def time_of(line: str) -> str | None:
    """The first timestamp of a line, as it stands there."""
    found = _TIME.search(line)
    return found[0] if found else None
