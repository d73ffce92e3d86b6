"""A study's folder: nothing computed is lost, nothing half-written is ever read."""

import errno
import os
import stat
import threading
import time

import pandas as pd
import pytest

from spectoolkit import config, runner
from spectoolkit.claims import claim
from spectoolkit.errors import RunError, UsageError
from spectoolkit.runner import LeftToOthers, missing_requests, run_cells
from spectoolkit.study import Store

TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=3", "max_new_tokens=4", "+grid.seed=[0,1,2]"]


class Quiet:
    """A progress bar that nobody sees, and that may stop a run."""

    def __init__(self, stop_at=None):
        self.done, self.stop_at = 0, stop_at

    def update(self, n=1):
        self.done += n
        if self.done == self.stop_at:
            raise KeyboardInterrupt

    def set_description(self, desc):
        pass


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    store, cells = Store(tmp_path), config.plan(TOY).cells
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, store, Quiet(stop_at=5))  # in the second cell of three
    assert [store.has(cell) for cell in cells] == [True, False, False]
    assert missing_requests(cells, store) == 6
    progress = Quiet()
    results = run_cells(cells, store, progress)
    assert progress.done == 6
    assert [len(result.rows) for result in results] == [3, 3, 3]
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name]


def test_a_resumed_study_equals_an_uninterrupted_one(tmp_path):
    cells = config.plan(TOY).cells
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, Store(tmp_path / "a"), Quiet(stop_at=4))
    resumed = run_cells(cells, Store(tmp_path / "a"), Quiet())
    whole = run_cells(cells, Store(tmp_path / "b"), Quiet())
    times = ["draft_s", "target_s", "verify_s"]
    for one, other in zip(resumed, whole, strict=True):
        assert one.rows.drop(columns=times).equals(other.rows.drop(columns=times))


def test_rows_come_in_the_order_of_the_requests(tmp_path):
    (result,) = run_cells(config.plan([*TOY[:-1], "batch_size=2"]).cells, Store(tmp_path), Quiet())
    (cell,) = config.plan(TOY[:-1]).cells
    assert list(result.rows["request_id"]) == [request.id for request in cell.build().requests]


def test_two_runs_at_once_share_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    computed, errors, live = [], [], runner.run_live

    def run_live(cell, *args):
        computed.append(cell.fingerprint)
        time.sleep(0.1)
        live(cell, *args)

    def work():
        try:
            assert len(run_cells(config.plan(TOY).cells, Store(tmp_path), Quiet())) == 3
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(runner, "run_live", run_live)
    cells = config.plan(TOY).cells
    threads = [threading.Thread(target=lambda: run_cells(cells, Store(tmp_path), Quiet())) for _ in range(3)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(computed) == sorted(cell.fingerprint for cell in cells)
    assert len(list((tmp_path / "cells").iterdir())) == 3  # and no claim


def test_a_worker_leaves_cells_that_another_process_is_at_and_takes_those_of_a_lost_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    store, cells = Store(tmp_path, waits=False), config.plan(TOY).cells
    with claim(store.claims_folder, cells[1].fingerprint), pytest.raises(LeftToOthers, match="1 of 3 cells"):
        run_cells(cells, store, Quiet())
    assert [store.has(cell) for cell in cells] == [True, False, True]

    # Another machine's claim holds while its heart beats; a worker waits for one beat, or for the claim to be dead.
    path = store.claims_folder / f".{cells[1].fingerprint}.claim-0"
    path.write_text('{"host": "another-machine", "pid": 1, "started": 0}')
    timer = threading.Timer(0.3, lambda: os.utime(path))
    timer.start()
    with pytest.raises(LeftToOthers):
        run_cells(cells, store, Quiet())
    timer.join()
    timer = threading.Timer(0.3, lambda: os.utime(path, (0, 0)))
    timer.start()
    assert len(run_cells(cells, store, Quiet())) == 3
    timer.join()
    assert "waiting for 1 cells that another-machine, process 1 computes" in capsys.readouterr().err


def damaged(path, how):
    """Cut it in the middle, empty it, or change a byte of its data, none of which Parquet needs to find the rest."""
    data = bytearray(path.read_bytes())
    place = data.index(b"PAR1") + 40
    data[place] ^= 255
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "flipped": data}[how])


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
@pytest.mark.parametrize("kind", ["cells", "steps"])
def test_a_damaged_file_is_named_set_aside_and_computed_again(kind, how, tmp_path, capsys):
    cells = config.plan(TOY).cells
    whole = [result.rows for result in run_cells(cells, Store(tmp_path), Quiet())]
    path = tmp_path / kind / f"{cells[1].fingerprint}.parquet"
    damaged(path, how)
    torn = path.read_bytes()
    progress = Quiet()
    again = run_cells(cells, Store(tmp_path), progress)
    assert progress.done == 3  # the requests of that cell
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{path} is damaged" in said
    assert (tmp_path / "damaged" / f"{kind}-{path.name}").read_bytes() == torn
    for one, other in zip(again, whole, strict=True):
        assert one.rows["tokens"].map(list).equals(other["tokens"].map(list))
    run_cells(cells, Store(tmp_path), Quiet(stop_at=1))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
def test_damaged_trajectories_are_sampled_again(how, tmp_path, capsys):
    first, second = [config.plan([*TOY[:-1], "engine=replay", f"num_draft_tokens={k}"]).cells for k in (2, 3)]
    (before,) = run_cells(first, Store(tmp_path), Quiet())
    (path,) = (tmp_path / "trajectories").iterdir()
    damaged(path, how)
    (after,) = run_cells(second, Store(tmp_path), Quiet())
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{path} is damaged" in said
    assert after.rows["tokens"].map(list).equals(before.rows["tokens"].map(list))


def test_a_file_that_is_damaged_while_the_study_runs_is_no_traceback(tmp_path):
    store, (cell, *_) = Store(tmp_path), config.plan(TOY).cells
    run_cells([cell], store, Quiet())
    damaged(store.cell_path(cell), "flipped")
    with pytest.raises(RunError, match=rf"{store.cell_path(cell).name} is not a readable cell.*computes it again"):
        store.load(cell)


def test_swapped_cells_are_named_set_aside_and_computed_again(tmp_path, capsys):
    cells = config.plan(TOY).cells
    whole = run_cells(cells, Store(tmp_path), Quiet())
    store = Store(tmp_path)
    one, other = (store.cell_path(cell) for cell in cells[:2])
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(RunError, match=f"holds the rows of cell {cells[1].fingerprint}"):
        store.load(cells[0])
    progress = Quiet()
    again = run_cells(cells, store, progress)
    assert progress.done == 6
    assert f"{other} is damaged (it holds the rows of cell {cells[0].fingerprint})" in capsys.readouterr().err
    for found, expected in zip(again, whole, strict=True):
        assert found.rows["tokens"].map(list).equals(expected.rows["tokens"].map(list))


def test_a_folder_from_before_there_were_checksums_is_read(tmp_path):
    cells = config.plan(TOY).cells
    run_cells(cells, Store(tmp_path), Quiet())
    for path in [*tmp_path.glob("cells/*"), *tmp_path.glob("steps/*")]:
        frame = pd.read_parquet(path)
        frame.attrs.pop("fingerprint", None)
        frame.to_parquet(path)
    (tmp_path / "store.json").unlink()
    assert len(run_cells(cells, Store(tmp_path), Quiet(stop_at=1))) == 3  # nothing is computed
    damaged(Store(tmp_path).cell_path(cells[0]), "cut")
    assert not Store(tmp_path).has(cells[0])


@pytest.mark.parametrize("said", ['{"format": 99, "records": 2}', '{"format": 2, "records": 1}', "{", "[]"])
def test_a_folder_of_another_version_is_refused(said, tmp_path):
    Store(tmp_path)
    (tmp_path / "store.json").write_text(said)
    with pytest.raises(UsageError, match=r"folder: expected one whose .*store.json says .*another version"):
        Store(tmp_path)


def test_what_a_killed_writer_left_is_removed_when_it_is_old(tmp_path):
    Store(tmp_path)
    old, new = tmp_path / "cells" / ".a.1-2.tmp.parquet", tmp_path / ".table.1-2.tmp.csv"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (time.time() - 4000,) * 2)
    Store(tmp_path)
    assert not old.exists()
    assert new.exists()


@pytest.mark.skipif(os.name != "posix", reason="folders without write permission")
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file"):
        Store(blocked / "study")
    if os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir()
        locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(RunError, match="cannot write"):
            Store(locked / "study")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_locked_disk_keeps_finished_cells(number, tmp_path, monkeypatch):
    store, cells = Store(tmp_path), config.plan(TOY).cells
    run_cells(cells[:1], store, Quiet())

    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(RunError, match=rf"cannot write .*{os.strerror(number)} \(finished cells are kept\)"):
            run_cells(cells, store, Quiet())
    assert [store.has(cell) for cell in cells] == [True, False, False]
    assert not list(tmp_path.rglob(".*"))  # no claim, nothing half-written
    assert len(run_cells(cells, store, Quiet())) == 3
