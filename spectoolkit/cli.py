"""The console script. Exit codes: 0 done, 1 a run failed, 2 the command or its settings are wrong, 130 interrupted."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

SHOW_TRACEBACK = "HYDRA_FULL_ERROR"  # Hydra's own switch

# Commands beside the one that runs studies: name -> module with run(arguments: list[str]) -> str, the text to print.
_COMMANDS = {"report": "spectoolkit.rebuild"}


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

    from spectoolkit import config

    arguments = sys.argv[1:]
    if all(argument in ("-m", "--multirun") for argument in arguments if argument.startswith("-")):
        # Hydra's own complaints, with our exit code.
        config.check_overrides([argument for argument in arguments if not argument.startswith("-")])

    def task(_: Any) -> None:
        said = HydraConfig.get().overrides
        searched = [override for override in said.hydra if override.startswith("hydra.searchpath=")]
        _reporting(lambda: print(config.plan([*searched, *said.task]).run()))

    hydra.main(config_path=str(config.config_folder()), config_name="config", version_base="1.3")(task)()


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
