"""A study that is killed, or run twice at once, ends as one that nobody disturbs."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spectoolkit import config

ROOT = Path(__file__).parents[2]
STUDY = [
    *("experiment=temperature_sweep", "target=tabular", "draft_model=tabular", "prompts.limit=2", "max_new_tokens=5"),
    *("grid.sampling.temperature=[0.0,0.7]", "grid.drafter=[argmax,same_temperature]"),
]
NUM_KILLS = 20


class Server:
    """`study_server`, asked for runs of `STUDY`."""

    def __init__(self, folder):
        self.folder = folder
        command = [sys.executable, "-W", "error", "-m", "tests.helpers.study_server", *STUDY, f"folder={folder}"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, folder, **how):
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), **how}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("studies"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(server):
    """The files of a study that nobody disturbs, and the seconds that it takes."""
    folder = server.folder / "undisturbed"
    found = server.ask(folder)
    assert found["statuses"] == [0], folder.with_suffix(".err").read_text()
    return results(folder), found["seconds"]


@pytest.fixture(scope="module")
def fingerprints():
    cells = config.plan(STUDY).cells
    assert {cell.engine for cell in cells} == {"live", "replay"}
    return sorted(cell.fingerprint for cell in cells)


def results(folder):
    """All tables and figures."""
    files = [path for path in folder.glob("[!.]*.*") if path.name != "manifest.json"]
    return {path.name: path.read_bytes() for path in files}


def names(folder, pattern):
    return sorted(path.name for path in folder.glob(pattern))


def computed(folder):
    return Counter(line.split()[0] for line in folder.with_suffix(".log").read_text().splitlines())


def test_killed_at_any_moment_it_goes_on_to_the_same_tables(server, undisturbed, fingerprints):
    tables, seconds = undisturbed
    assert {"table.csv", "table.md", "table.parquet", "differences.csv", "figure.pdf"} <= tables.keys()
    kills, studies, rng = 0, 0, random.Random(0)
    while kills < NUM_KILLS or studies < 3:
        folder, lost = server.folder / f"killed-{studies}", 0
        while kills < NUM_KILLS:
            # At any moment of what is left to do, which gets shorter from run to run.
            found = server.ask(folder, kill_after_s=rng.uniform(0, seconds) * rng.random())
            kills, lost = kills + found["statuses"].count(-9), lost + 1
            if found["statuses"] == [0]:
                break
            assert found["statuses"] == [-9]
        assert server.ask(folder)["statuses"] == [0]
        assert results(folder) == tables
        assert names(folder, "cells/*.parquet") == [f"{name}.parquet" for name in fingerprints]
        assert len(names(folder, "trajectories/*.parquet")) == 2
        left = [path for path in folder.rglob(".*") if ".tmp" not in path.name]
        assert not left  # no claim; half-written files are hidden, and removed when they are old
        assert not (folder / "damaged").exists()
        assert not folder.with_suffix(".err").read_text()
        assert all(1 <= times <= 1 + lost for times in computed(folder).values())
        studies += 1


def test_killed_after_every_single_file_it_loses_none(server, undisturbed, fingerprints):
    folder, kills = server.folder / "file-by-file", 0
    while len(names(folder, "cells/*.parquet")) < len(fingerprints):
        before = set(folder.glob("*/*.parquet"))
        # A decoded cell is two files, the second of which says that it is done.
        assert server.ask(folder, dies_after_files=1 + kills % 2)["statuses"] == [-9]
        assert before <= set(folder.glob("*/*.parquet"))
        kills += 1
        assert kills < 50
    assert kills > len(fingerprints)
    assert server.ask(folder)["statuses"] == [0]
    assert results(folder) == undisturbed[0]


def test_three_runs_at_once_share_the_cells_and_write_the_same_tables(server, undisturbed, fingerprints):
    folder = server.folder / "shared"
    assert server.ask(folder, runs=3)["statuses"] == [0, 0, 0]
    assert results(folder) == undisturbed[0]
    assert names(folder, "cells/*") == [f"{name}.parquet" for name in fingerprints]
    assert computed(folder) == Counter(fingerprints)  # each cell once


def test_a_lost_one_of_several_runs_is_made_up_for(server, undisturbed, fingerprints):
    folder = server.folder / "lost"
    server.ask(folder, runs=2, kill_after_s=undisturbed[1] / 4)
    assert server.ask(folder, runs=2)["statuses"] == [0, 0]
    assert results(folder) == undisturbed[0]
    assert names(folder, "cells/*") == [f"{name}.parquet" for name in fingerprints]
