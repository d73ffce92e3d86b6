"""The console script. Exit codes: 0 done, 1 a run failed, 2 the command or its settings are wrong, 130 interrupted."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

SHOW_TRACEBACK = "HYDRA_FULL_ERROR"  # Hydra's own switch
# First word -> module whose `run(arguments)` gives the text to print; anything else is for Hydra.
_COMMANDS = {"import": "spectoolkit.serving.command", "report": "spectoolkit.rebuild"}


def main() -> None:
    """Run what the command line describes."""
    name, *arguments = sys.argv[1:] or [""]
    if name in _COMMANDS:
        _reporting(lambda: print(importlib.import_module(_COMMANDS[name]).run(arguments)))
    else:
        _reporting(_run)


def _run() -> None:
    # Imported here, so that an interruption while the packages are read ends as any other.
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from spectoolkit.files import config_folder

    arguments = sys.argv[1:]
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    spread: Any = None
    if all(argument in ("-m", "--multirun") for argument in arguments if argument.startswith("-")):
        from spectoolkit import config  # not for what Hydra answers itself: completion waits for it at every key

        # Hydra's own complaints, with our exit code.
        config.check_launcher(overrides)
        config.check_overrides(overrides)
        if len(arguments) > len(overrides) and any(argument.startswith("worker=") for argument in overrides):
            config.check_workers(overrides)
            spread = config.plan(config.of_the_study(next(config.points(overrides))))
    launched_by, launched_in = os.getpid(), os.getcwd()

    def task(_: Any) -> None:
        from spectoolkit import config

        said = HydraConfig.get().overrides
        searched = [override for override in said.hydra if override.startswith("hydra.searchpath=")]
        point = [*searched, *said.task]
        if os.getpid() == launched_by:
            _reporting(lambda: print(config.plan(point).run()))
        else:
            _run_elsewhere(point, launched_in)

    hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(task)()
    if spread is not None:
        print(spread.state())


def _run_elsewhere(point: Sequence[str], folder: str) -> None:
    """A job that a launcher has carried to another process, perhaps on another machine.

    It works in the folder that it was launched from, so that relative paths mean what they meant there. Errors go back
    to the launcher; Hydra shows its own kind without a traceback.
    """
    from hydra.errors import HydraException

    from spectoolkit import config
    from spectoolkit.errors import RunError, UsageError

    try:
        os.chdir(folder)
    except OSError as error:
        raise HydraException(
            f"spectoolkit: expected {folder} to be there on every worker ({error.strerror})"
        ) from error
    try:
        print(config.plan(point).run(), flush=True)
    except (UsageError, RunError) as error:
        raise HydraException(f"spectoolkit: {error}") from error


def _reporting(action: Callable[[], object]) -> None:
    """Turn errors into one message and an exit code; the traceback is shown only when asked for."""
    from spectoolkit.errors import RunError, UsageError

    try:
        action()
    except UsageError as error:
        _leave(2, str(error))
    except RunError as error:
        _leave(1, str(error))
    except KeyboardInterrupt:
        _leave(130, "interrupted; finished cells are kept, the same command goes on from there")
    except Exception as error:
        if os.environ.get(SHOW_TRACEBACK) == "1":
            raise
        _leave(1, f"{type(error).__name__}: {error}\n(set {SHOW_TRACEBACK}=1 to see where it came from)")


def _leave(code: int, message: str) -> NoReturn:
    print(f"spectoolkit: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
