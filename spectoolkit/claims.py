"""Who works on what, among processes that share a folder, on one machine or on many.

A claim is a file `.KEY.claim-N` that exactly one process can create. Its owner touches it every `HEARTBEAT_S`. A claim
whose process is gone, or that nobody has touched for `EXPIRY_S`, is dead: it is taken over by creating number N + 1,
which again only one can. An owner that was merely asleep may then work beside the one that took over: work twice, never
a wrong file, since files are replaced as a whole (`files.replace`).
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from spectoolkit.files import writing

HEARTBEAT_S = 15.0
EXPIRY_S = 150.0  # well above the minute for which network file systems may show an old time


@dataclass(frozen=True)
class Holder:
    """The process behind a claim that is not dead.

    Attributes:
        name: host and process, for people.
        is_here: it runs on this machine.
        beat_s: when it last touched its claim, on the file system's clock.
    """

    name: str
    is_here: bool
    beat_s: float


@contextmanager
def claim(folder: Path, key: str) -> Iterator[bool]:
    """Whether the work `key` is this process's own inside the `with` block; False where another one is at it.

    The claim lies in `folder`, which is to be where the result appears: a network file system looks at a folder anew
    after making a file in it, so a result that another process has finished is seen after the claim at the latest.

    Raises:
        RunError: the claim cannot be written.
    """
    path = _take(folder, key)
    if path is None:
        yield False
        return
    done = threading.Event()
    heart = threading.Thread(target=_beat, args=(path, done), daemon=True)
    heart.start()
    try:
        yield True
    finally:
        done.set()
        heart.join()
        for older in _claims(folder, key):
            if _number(older) <= _number(path):
                older.unlink(missing_ok=True)


def holder(folder: Path, key: str) -> Holder | None:
    """Who works on `key`; None where nobody does."""
    found = _claims(folder, key)
    return _holder(found[-1]) if found else None


def remove_dead(folder: Path) -> None:
    """Remove the claims in `folder` that processes left behind when they were killed."""
    for path in folder.glob(".*.claim-*"):
        if _holder(path) is None:
            path.unlink(missing_ok=True)


def _take(folder: Path, key: str) -> Path | None:
    found = _claims(folder, key)
    if found and _holder(found[-1]) is not None:
        return None
    path = folder / f".{key}.claim-{_number(found[-1]) + 1 if found else 0}"
    process = psutil.Process()
    owner = {"host": _host(), "pid": process.pid, "started": process.create_time()}
    with writing(path):
        try:
            with path.open("x") as file:
                file.write(json.dumps(owner))
        except FileExistsError:
            return None
        except OSError:
            path.unlink(missing_ok=True)
            raise
    return path


def _beat(path: Path, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT_S):
        with suppress(OSError):
            os.utime(path)


def _holder(path: Path) -> Holder | None:
    try:
        with path.open() as file:  # opening makes a network file system ask for the file's time
            text, beat_s = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        owner = json.loads(text)
        host, pid, started = str(owner["host"]), int(owner["pid"]), float(owner["started"])
    except (ValueError, KeyError, TypeError):  # just made, not written yet
        host, pid, started = "unknown host", 0, 0.0
    is_here = host == _host()
    if (is_here and not _runs(pid, started)) or _now_s(path.parent) - beat_s > EXPIRY_S:
        return None
    return Holder(f"{host.split()[0]}, process {pid}", is_here, beat_s)


def _runs(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _now_s(folder: Path) -> float:
    """The time on the file system's own clock, which need not be that of this machine."""
    with writing(folder), tempfile.NamedTemporaryFile(prefix=".now-", suffix=".tmp", dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _host() -> str:
    """This machine, or this container: process numbers mean the same wherever it is equal."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _claims(folder: Path, key: str) -> list[Path]:
    """The claims of a key, the one that counts last."""
    return sorted(folder.glob(f".{key}.claim-*"), key=_number)


def _number(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])
