"""Data frames in Parquet files that show whether they are whole: the SHA-256 of all other bytes stands among them.

Parquet's own page checksums leave its footer out, and a file beside the file could be of another writer.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from spectoolkit.files import replace

_MARK = b"spectoolkit-sha256:"
_BLANK = b"0" * 64


class DamagedFile(ValueError):
    """A file that is not what was written: cut, emptied or changed."""


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Keep `frame` with its `attrs`, its index left out; any Parquet reader reads the file.

    Raises:
        RunError: the file cannot be written (disk full, no permission).
    """
    table = pa.Table.from_pandas(frame, preserve_index=False)
    notes = {b"PANDAS_ATTRS": json.dumps(frame.attrs).encode(), b"checksum": _MARK + _BLANK}
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **notes})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    data = buffer.getvalue()
    begin = _digest_begin(data)
    sealed = data[:begin] + _digest(data, begin) + data[begin + len(_BLANK) :]
    replace(path, lambda temporary: temporary.write_bytes(sealed))


def read_frame(path: Path, *, is_sealed: bool = True) -> pd.DataFrame:
    """What `write_frame` wrote.

    Args:
        is_sealed: whether the file has to have a checksum; one that is there has to fit in any case.

    Raises:
        DamagedFile: the checksum does not fit, or it is no Parquet file.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    begin = _digest_begin(data)
    if begin < 0 and is_sealed:
        raise DamagedFile("there is no checksum in it")
    if begin >= 0 and data[begin : begin + len(_BLANK)] != _digest(data, begin):
        raise DamagedFile("its checksum does not fit")
    try:
        return pd.read_parquet(io.BytesIO(data))
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise DamagedFile(f"{type(error).__name__}: {error}") from error


def _digest_begin(data: bytes) -> int:
    """Where the checksum stands, or -1. The last place that looks like one, since a footer comes after the data."""
    place = data.rfind(_MARK)
    return place if place < 0 else place + len(_MARK)


def _digest(data: bytes, begin: int) -> bytes:
    return hashlib.sha256(data[:begin] + data[begin + len(_BLANK) :]).hexdigest().encode()
