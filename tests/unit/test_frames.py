"""A file that is not what was written is never read as if it were."""

import random

import pandas as pd
import pytest

from spectoolkit.frames import DamagedFile, read_frame, write_frame


@pytest.fixture
def stored(tmp_path):
    frame = pd.DataFrame({"id": ["a", "b"], "tokens": [[1, 2], [3]], "count": [1.5, float("nan")]})
    frame.attrs = {"wall_s": 1.0, "packages": {"x": "1"}}
    write_frame(tmp_path / "frame.parquet", frame)
    return frame, tmp_path / "frame.parquet"


def test_what_was_written_is_read_also_by_others(stored):
    frame, path = stored
    for found in (read_frame(path), pd.read_parquet(path)):
        assert found.assign(tokens=found["tokens"].map(list)).equals(frame)
        assert found.attrs == frame.attrs


def test_equal_frames_give_equal_bytes(stored, tmp_path):
    frame, path = stored
    write_frame(tmp_path / "again.parquet", frame)
    assert (tmp_path / "again.parquet").read_bytes() == path.read_bytes()


def test_a_changed_bit_anywhere_is_detected(stored):
    path = stored[1]
    whole, rng = path.read_bytes(), random.Random(0)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DamagedFile, match="checksum"):
            read_frame(path)


def test_a_cut_anywhere_is_detected(stored):
    path = stored[1]
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile, match="checksum"):
            read_frame(path)
        with pytest.raises(DamagedFile):
            read_frame(path, is_sealed=False)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedFile, match="does not fit"):
        read_frame(path)


def test_a_file_without_a_checksum_is_read_only_where_that_is_said(stored):
    frame, path = stored
    pd.read_parquet(path).to_parquet(path)  # pandas writes none, and does not carry ours over
    assert len(read_frame(path, is_sealed=False)) == len(frame)
    with pytest.raises(DamagedFile, match="no checksum"):
        read_frame(path)
