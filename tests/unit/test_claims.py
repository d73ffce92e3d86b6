"""Never two processes at one piece of work, and no work that a dead process keeps from the others."""

import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from spectoolkit import claims
from spectoolkit.claims import claim, holder, remove_dead
from spectoolkit.errors import RunError

ELSEWHERE = {"host": "another-machine", "pid": 1, "started": 0.0}


def leave(folder, owner, age_s=0.0, number=0):
    """A claim as another process would have left it."""
    path = folder / f".key.claim-{number}"
    path.write_text(owner if isinstance(owner, str) else json.dumps(owner))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_one_at_a_time(tmp_path):
    with claim(tmp_path, "key") as mine, claim(tmp_path, "key") as again, claim(tmp_path, "other") as other:
        assert (mine, again, other) == (True, False, True)
        found = holder(tmp_path, "key")
        assert found is not None
        assert found.is_here
        assert str(os.getpid()) in found.name
    assert not list(tmp_path.iterdir())
    assert holder(tmp_path, "key") is None
    with pytest.raises(KeyboardInterrupt), claim(tmp_path, "key") as mine:
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_killed_process_holds_nothing(tmp_path):
    """Its number may have been given to another process since, or belong to a zombie."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {"host": claims._host(), "pid": child.pid, "started": psutil.Process(child.pid).create_time()}
    leave(tmp_path, owner)
    with claim(tmp_path, "key") as mine:
        assert not mine
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:  # nobody has waited for it yet
        time.sleep(0.01)
    with claim(tmp_path, "key") as mine:
        assert mine
    child.communicate()
    leave(tmp_path, owner)
    with claim(tmp_path, "key") as mine:
        assert mine
    leave(tmp_path, {**owner, "pid": os.getpid()})
    with claim(tmp_path, "key") as mine:
        assert mine


@pytest.mark.parametrize("owner", [ELSEWHERE, "", '{"host'])
def test_a_claim_of_another_machine_holds_while_its_heart_beats(owner, tmp_path):
    path = leave(tmp_path, owner, age_s=claims.EXPIRY_S - 20)
    with claim(tmp_path, "key") as mine:
        assert not mine
    found = holder(tmp_path, "key")
    assert found is not None
    assert not found.is_here
    leave(tmp_path, owner, age_s=claims.EXPIRY_S + 20)
    assert holder(tmp_path, "key") is None
    with claim(tmp_path, "key") as mine:
        assert mine
        assert path.exists()  # the way of taking over is the next number
    assert not list(tmp_path.iterdir())


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT_S", 0.02)
    with claim(tmp_path, "key"):
        first = holder(tmp_path, "key")
        time.sleep(0.2)
        second = holder(tmp_path, "key")
    assert first is not None
    assert second is not None
    assert second.beat_s > first.beat_s


def test_only_one_of_many_takes_over(tmp_path):
    for _ in range(20):
        leave(tmp_path, ELSEWHERE, age_s=1e4)
        ready, over, won = threading.Barrier(8), threading.Barrier(8), []

        def work(ready=ready, over=over, won=won):
            ready.wait()
            with claim(tmp_path, "key") as mine:
                won.append(mine)
                over.wait()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False] * 7 + [True]
        assert not list(tmp_path.iterdir())


def test_who_slept_through_its_claim_leaves_that_of_the_next_one_alone(tmp_path):
    with claim(tmp_path, "key"):
        later = leave(tmp_path, ELSEWHERE, number=1)
    assert list(tmp_path.iterdir()) == [later]


def test_dead_claims_are_removed_and_others_are_not(tmp_path):
    leave(tmp_path, ELSEWHERE, age_s=1e4)
    alive = leave(tmp_path, ELSEWHERE, number=1)
    (tmp_path / "cell.parquet").write_text("")
    remove_dead(tmp_path)
    assert sorted(tmp_path.iterdir()) == [alive, tmp_path / "cell.parquet"]


def test_a_claim_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(RunError, match="cannot write"), claim(tmp_path / "nowhere", "key"):
        pass
