"""A study's folder: nothing computed is lost, nothing half-written is ever read."""

import os
import stat
import threading

import pytest

from spectoolkit import config
from spectoolkit.errors import RunError
from spectoolkit.runner import missing_requests, run_cells
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


def test_two_runs_at_once(tmp_path):
    cells = config.plan(TOY).cells
    errors = []

    def work():
        try:
            run_cells(config.plan(TOY).cells, Store(tmp_path), Quiet())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(1)]
    for thread in threads:
        thread.start()
    results = run_cells(cells, Store(tmp_path), Quiet())
    for thread in threads:
        thread.join()
    assert not errors
    assert [len(result.rows) for result in results] == [3, 3, 3]
    assert len(list((tmp_path / "cells").iterdir())) == 3


def test_a_torn_cell_is_named_and_never_taken_for_a_whole_one(tmp_path):
    store, cells = Store(tmp_path), config.plan(TOY).cells
    run_cells(cells, store, Quiet())
    path = store.cell_path(cells[1])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match=rf"{path.name} is not a readable cell.*delete it"):
        run_cells(cells, store, Quiet())


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


def test_a_full_disk_keeps_finished_cells(tmp_path, monkeypatch):
    store, cells = Store(tmp_path), config.plan(TOY).cells
    run_cells(cells[:1], store, Quiet())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pandas.DataFrame.to_parquet", full)
    with pytest.raises(RunError, match=r"No space left on device \(finished cells are kept\)"):
        run_cells(cells, store, Quiet())
    assert [store.has(cell) for cell in cells] == [True, False, False]
