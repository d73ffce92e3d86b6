"""A process that has imported everything and composed one study, and runs it in forks of itself.

python -m tests.helpers.study_server OVERRIDE...; then a JSON line per command on standard input: {"folder": ...,
"runs": 1, "kill_after_s": null, "dies_after_files": null}. That many runs start at once in that folder; all are killed
after that time, or when they have put so many files in their place. The answer is a JSON line: {"statuses": [0 or minus
the signal], "seconds": ...}. Each run appends a line "FINGERPRINT PID" to FOLDER.log when it begins to compute a cell,
and what it says on standard error to FOLDER.err.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from spectoolkit import config, laps, runner


def run(plan: config.Plan, dies_after_files: int | None) -> None:
    """The study, with the seconds that a step takes (the one thing in a table that a clock has a say in) fixed."""
    laps.Laps.seconds = property(lambda self: (0.01, 0.01, 0.01))  # type: ignore[assignment]
    log = plan.folder.with_suffix(".log")

    def noting(compute):
        def noted(cells, *args):
            begun = cells if isinstance(cells, list) else [cells]
            with log.open("a") as file:
                file.write("".join(f"{cell.fingerprint} {os.getpid()}\n" for cell in begun))
            return compute(cells, *args)

        return noted

    if dies_after_files is not None:
        replace, placed = os.replace, []

        def replace_and_die(*args):
            replace(*args)
            placed.append(args)
            if len(placed) == dies_after_files:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace_and_die
    runner.run_live, runner.run_replay = noting(runner.run_live), noting(runner.run_replay)
    plan.run()


def fork(plan: config.Plan, dies_after_files: int | None) -> int:
    """Start a run; its process number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(plan.folder.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.dup2(2, 1)
        run(plan, dies_after_files)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def answer(
    plan: config.Plan,
    folder: str,
    runs: int = 1,
    kill_after_s: float | None = None,
    dies_after_files: int | None = None,
) -> dict:
    """Run the study as the command says."""
    begin = time.monotonic()
    children = [fork(dataclasses.replace(plan, folder=Path(folder)), dies_after_files) for _ in range(runs)]
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        for child in children:
            os.kill(child, signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return {"statuses": statuses, "seconds": time.monotonic() - begin}


if __name__ == "__main__":
    composed = config.plan(sys.argv[1:])
    for line in sys.stdin:
        print(json.dumps(answer(composed, **json.loads(line))), flush=True)
