"""Prompts out of any data set: one of the Hugging Face hub, or a file or folder of one's own."""

from __future__ import annotations

import os
import random
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from spectoolkit.errors import UsageError
from spectoolkit.prompts import PromptSet, check_limit, check_unique_ids, label, make_prompt, rounds, shown

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
SPEAKERS = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
"""Names of roles that public conversations use besides those of `prompts.ROLES`."""

_ROWS_OF_A_SPLIT = re.compile(r"([\w.-]+)\[(\d*):(\d+)\]")
_UNREACHABLE = ("ConnectError", "ConnectTimeout", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ProxyError")


def load_datasets(
    path: str,
    config_name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    data_files: Any = None,
    column: str | None = None,
    template: str | None = None,
    system: str | None = None,
    turns: int | None = None,
    id_column: str | None = None,
    category_column: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    bad_rows: Literal["error", "skip"] = "error",
) -> PromptSet:
    """Return the prompts in any source that ``datasets.load_dataset`` reads.

    Where from: `path`, `config_name`, `split` (slices as in "train[:100]" included) and `data_files` are passed on to
    that function. A `path` that is a file of one of the `FORMATS` is read as it is: it is the split asked for,
    and `config_name` and `data_files`, which the copy on the hub has, count for nothing. With `streaming` no more than
    the rows of the split's slice is downloaded, which has to be one in rows; nothing else changes.

    What: exactly one of `column` and `template` says what the prompt is. A template is filled with the row's columns by
    `str.format`, as in "Summarise: {article}", and gives raw text. A column holds raw text, lists of {role, content} or
    {from, value}, or lists of texts, which are what the user says in turn. Conversations begin with a system or user
    message; `turns` of the user's messages are kept, None for all; assistant messages behind the last one are left out,
    since they are the data set's own answer. Of a list of texts only the first one can be asked: those behind it need
    answers that are not there. `system`, text or a template, becomes the system message of what has none.

    Which: `limit` keeps that many, spread evenly over the categories (see `prompts.spread`), so without
    `category_column` the first ones; with a `seed` they are drawn from the split rather than taken from its beginning.
    A smaller limit gives a subset of a larger one, and all come in the order of the rows. Without `id_column` the id is
    "row-<index>", counted from the beginning of the slice; without `category_column` every category is "all".

    A row that gives no prompt is an error, or with bad_rows="skip" left out; another one takes its place. The set's
    `changes` count such rows, and the conversations of which later turns of the user are left out.
    Raises `UsageError` for a source that cannot be loaded, a missing column, a bad template, an empty or ill-typed
    value, duplicate ids or a split without rows.
    """
    template_columns, system_columns = _check_arguments(column, template, system, turns, split, seed, bad_rows)
    check_limit(limit)
    wanted = [("id_column", id_column), ("category_column", category_column), ("column", column)]
    wanted += [("template", used) for used in template_columns] + [("system", used) for used in system_columns]
    dataset = _load(path, config_name, split, streaming, data_files, wanted)

    order: Iterable[int] = range(len(dataset))
    if seed is not None:
        order = random.Random(seed).sample(order, len(dataset))
    if category_column is not None:
        categories = dataset[category_column]
        shuffled = list(order)
        order = (shuffled[place] for place in rounds(str(categories[index]) for index in shuffled))
    found = {}
    skipped: list[str] = []
    num_shortened = 0
    for index in order:
        if len(found) == limit:
            break
        row = cast(dict[str, Any], dataset[index])
        where = f"{path}, split {split}, row {index}"
        try:
            identifier = f"row-{index}" if id_column is None else label(row[id_column], id_column, where)
            category = "all" if category_column is None else label(row[category_column], category_column, where)
            value = (
                row[column] if column is not None else _fill(str(template), template_columns, row, where, "template")
            )
            content, is_shortened = _content(value, column or "template", turns, where)
            if system is not None:
                content = _with_system(content, _fill(system, system_columns, row, where, "system"))
            found[index] = make_prompt(identifier, category, content, column or "template", where)
        except UsageError as error:
            if bad_rows == "error":
                raise
            skipped.append(str(error))
            continue
        num_shortened += is_shortened
    if not found:
        raise UsageError(f"bad_rows: expected at least one row that gives a prompt, got none; the first: {skipped[0]}")
    prompts = [found[index] for index in sorted(found)]
    check_unique_ids(prompts)
    changes = {"prompts without the user's later turns": num_shortened}
    return PromptSet.of(prompts, changes | ({f"rows skipped (first: {skipped[0]})": len(skipped)} if skipped else {}))


def _check_arguments(
    column: str | None,
    template: str | None,
    system: str | None,
    turns: int | None,
    split: str,
    seed: int | None,
    bad_rows: str,
) -> tuple[list[str], list[str]]:
    """Refuse what can be refused without any data; returns the columns of `template` and of `system`."""
    if (column is None) == (template is None):
        given = "neither" if column is None else "both"
        raise UsageError(f"column, template: expected exactly one of them; got {given}")
    if not isinstance(split, str):
        raise UsageError(f'split: expected the name of a split, such as "train"; got {shown(split)}')
    for name, value, least in (("turns", turns, 1), ("seed", seed, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"{name}: expected a whole number of at least {least}, or null; got {shown(value)}")
    if bad_rows not in ("error", "skip"):
        raise UsageError(f"bad_rows: expected error or skip; got {shown(bad_rows)}")
    template_columns = [] if template is None else _columns_of(template, "template")
    if template is not None and not template_columns:
        raise UsageError(f"template: expected named columns in braces, such as {{article}}; got {template!r}")
    return template_columns, [] if system is None else _columns_of(system, "system")


def _load(
    path: str,
    config_name: str | None,
    split: str,
    streaming: bool,
    data_files: Any,
    wanted: Sequence[tuple[str, str | None]],
) -> Dataset:
    """The rows of a split, with the wanted columns only, each given as (argument that asks for it, column or None)."""
    source = os.path.expanduser(path) if isinstance(path, str) else path
    if (file := _local_file(path)) is not None:  # which is the split that is asked for
        name = re.match(r"[\w.-]+", split.strip())
        source, config_name, data_files = FORMATS[file.suffix], None, {name.group() if name else "train": str(file)}
        streaming = False  # nothing is downloaded
    sliced = _ROWS_OF_A_SPLIT.fullmatch(split.strip())
    if streaming and sliced is None:
        raise UsageError(f"split: expected with streaming=true the rows to read, such as train[:1000]; got {split!r}")
    try:
        # Imported here because it takes a second or more, which no other prompt source should pay for.
        import datasets
    except ImportError as error:
        raise UsageError(f"prompts: expected the package datasets ({error}); pip install datasets") from error
    try:
        if sliced is None or not streaming:
            whole = datasets.load_dataset(source, name=config_name, split=split, data_files=data_files)
            if len(whole):  # without rows a file has no columns either
                whole = whole.select_columns(_check_columns(wanted, whole.column_names))
        else:
            name, start, stop = sliced.groups()
            stream = datasets.load_dataset(source, name=config_name, split=name, data_files=data_files, streaming=True)
            rows = list(islice(_rows(stream, wanted), int(start or 0), int(stop)))
            whole = datasets.Dataset.from_list(rows)
    except UsageError:
        raise
    except Exception as error:  # of whatever library reads this source
        raise _explained(error, path, config_name, split, data_files) from error
    if len(whole) == 0:
        raise UsageError(f"path: expected at least one row in split {split!r} of {path!r}; got none")
    return whole


def _rows(stream: Any, wanted: Sequence[tuple[str, str | None]]) -> Iterator[dict[str, Any]]:
    """The rows of a stream with the wanted columns; what a stream has is not always known before its first row."""
    if stream.column_names is not None:
        stream = stream.select_columns(_check_columns(wanted, stream.column_names))
    needed: list[str] = []
    for row in stream:
        needed = needed or _check_columns(wanted, list(row))
        yield {name: row.get(name) for name in needed}


def _local_file(path: str) -> Path | None:
    """The file that `path` is; None for what `load_dataset` has to find."""
    if not isinstance(path, str) or "\0" in path:
        raise UsageError(f"path: expected the name of a data set, or a file or folder; got {shown(path)}")
    file = Path(path).expanduser()
    if file.is_file():
        if file.suffix not in FORMATS:
            raise UsageError(f"path: expected a file that ends in {', '.join(FORMATS)}; got {path!r}")
        return file
    if file.suffix in FORMATS:
        raise UsageError(f"path: expected a readable file; {path!r} is not there")
    return None


def _explained(error: Exception, path: str, config_name: str | None, split: str, data_files: Any) -> UsageError:
    """Why a source could not be read, and, where the network is the reason, how to go on without."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    if any(isinstance(link, ConnectionError) or type(link).__name__ in _UNREACHABLE for link in chain):
        return UsageError(
            f"path: {path!r} is neither here nor can the Hugging Face hub be reached ({type(error).__name__}); "
            f"offline, say prompts.path=FILE with a copy of it ({', '.join(FORMATS)}), or read it once where there is "
            "a network: later runs find it in the cache"
        )
    return UsageError(
        "path, config_name, split, data_files: expected a source that datasets.load_dataset can read; "
        f"got path={path!r}, config_name={config_name!r}, split={split!r}, data_files={data_files!r}: "
        f"{type(error).__name__}: {error}"
    )


def _check_columns(wanted: Iterable[tuple[str, str | None]], available: Sequence[str]) -> list[str]:
    """The wanted columns, each once; the others may hold images or sound, which would be decoded with every row."""
    for argument, column in wanted:
        if column is not None and column not in available:
            raise UsageError(
                f"{argument}: expected one of the available columns ({', '.join(available)}); got {column!r}"
            )
    return list(dict.fromkeys(column for _, column in wanted if column is not None))


def _columns_of(template: str, argument: str) -> list[str]:
    """The columns that a template uses, in order: "{a}: {b[c]}" gives ["a", "b"]."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{argument}: expected a str.format template; got {template!r} ({error})") from error
    columns = [re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields]
    if "" in columns:
        raise UsageError(f"{argument}: expected named columns in braces, such as {{article}}; got {template!r}")
    return columns


def _fill(template: str, columns: Iterable[str], row: Mapping[str, Any], where: str, argument: str) -> str:
    for column in columns:
        # str.format would write "None" into the prompt.
        if row[column] is None:
            raise UsageError(f"{where}: {argument}: expected a value in column {column!r}; got None")
    try:
        return template.format(**row)
    except (LookupError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(
            f"{where}: {argument}: expected one that fits the row; got {template!r} ({type(error).__name__}: {error})"
        ) from error


def _content(value: Any, field: str, turns: int | None, where: str) -> tuple[dict[str, Any], bool]:
    """{"text": ...} or {"messages": [...]} as `prompts.make_prompt` takes it, and whether later turns were left out."""
    if not isinstance(value, list):
        return {"text": value}, False
    if value and all(isinstance(turn, str) for turn in value):
        if turns not in (None, 1):
            raise UsageError(
                f"turns: expected 1 for {field!r}, which holds no answers that later turns could follow; got {turns}"
            )
        return {"text": value[0]}, len(value) > 1
    messages = [_message(item) for item in value]
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == "assistant":
        raise UsageError(f"{where}: {field!r}: expected a conversation that begins with the user; got the assistant")
    asked = [i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"]
    if turns is not None and len(asked) > turns:
        return {"messages": messages[: asked[turns - 1] + 1]}, True
    end = len(messages)
    while end and isinstance(messages[end - 1], dict) and messages[end - 1].get("role") == "assistant":
        end -= 1
    return {"messages": messages[:end]}, False


def _message(item: Any) -> Any:
    """{role, content} of {from, value}; anything else as it is, to be refused with its place."""
    if not isinstance(item, dict):
        return item
    if item.get("role") is None and item.get("from") is not None:
        item = {"role": item["from"], "content": item.get("value")}
    role = item.get("role")
    return {**item, "role": SPEAKERS.get(role, role)} if isinstance(role, str) else item


def _with_system(content: Mapping[str, Any], text: str) -> dict[str, Any]:
    """`content` with a system message in front, if it has none."""
    messages = content["messages"] if "messages" in content else [{"role": "user", "content": content["text"]}]
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
        return {"messages": messages}
    return {"messages": [{"role": "system", "content": text}, *messages]}
