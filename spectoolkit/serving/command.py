"""`spectoolkit import vllm|sglang|llamacpp LOG`: acceptance as an engine reports it, beside a study's prediction."""

from __future__ import annotations

from dataclasses import replace

from spectoolkit.errors import UsageError
from spectoolkit.serving import llamacpp, sglang, study, table, vllm
from spectoolkit.serving.counts import pooled
from spectoolkit.serving.source import Source

FORMATS = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}
KEYS = {
    "folder": "where table.md and table.csv are written",
    "study": "a study's folder; its cells are put beside the served figures",
    "before": "an earlier dump of the same server's counters, subtracted",
}


def run(arguments: list[str]) -> str:
    """What the command line shows.

    Args:
        arguments: format, file (plain or gzip), then `key=value` for the keys of `KEYS`.

    Raises:
        UsageError: arguments that are not understood, a file without a line that says anything of acceptance, or as the
            readers and `study.read` say.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        return usage()
    name, *rest = arguments
    if name not in FORMATS:
        raise UsageError(f"import: expected one of {', '.join(FORMATS)}, got {name!r}\n{usage()}")
    if not rest or "=" in rest[0].rpartition("/")[2]:
        raise UsageError(
            f"import {name}: expected a log or a metrics dump, got {rest[0] if rest else 'none'}\n{usage()}"
        )
    path, settings = rest[0], _settings(rest[1:])
    source = Source(path)
    before = Source(settings["before"]) if "before" in settings else None
    served = FORMATS[name].read(source, before)
    cut = [f"{s.path.name} is cut off: what could be unpacked was read." for s in (source, before) if s and s.is_cut]
    if not served.readings:
        words = f"{path} has none, or nothing was drafted"
        raise UsageError(". ".join([f"log: expected {FORMATS[name].LOOKED_FOR}; {words}", *cut]))
    served = replace(served, notes=(*served.notes, *cut))
    figures = pooled(served)
    cells = study.read(settings["study"], served.num_draft_tokens) if "study" in settings else []
    shown = table.markdown(served, figures, source, cells, settings.get("study", ""))
    if "folder" not in settings:
        return shown
    table.write(settings["folder"], shown, served, figures, source, cells)
    return f"{shown}\ntable.md and table.csv are in {settings['folder']}"


def usage() -> str:
    """How the command is called."""
    keys = "\n".join(f"  {key}=..  {words}" for key, words in KEYS.items())
    return f"spectoolkit import {'|'.join(FORMATS)} LOG|METRICS [key=value ..]\n{keys}"


def _settings(arguments: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in KEYS or not equals or not value:
            raise UsageError(f"import: expected key=value with a key among {', '.join(KEYS)}, got {argument!r}")
        if key in found:
            raise UsageError(f"import: expected every key once, got {key} twice")
        found[key] = value
    return found
