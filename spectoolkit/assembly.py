"""From plain settings to objects: check one cell's settings, and build what it decodes with.

A group of settings names a class or function (`_target_`) and its keyword parameters, nothing else.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.decode import check_pair
from spectoolkit.drafters.stream import as_stream
from spectoolkit.errors import UsageError
from spectoolkit.interfaces import Drafter, DraftStream, LanguageModel, Verifier
from spectoolkit.models.causal_lm import CausalLM
from spectoolkit.models.prefix_cache import PrefixCache
from spectoolkit.prompt_length import LengthRule, fit
from spectoolkit.prompts import Prompt, PromptSet
from spectoolkit.replay import check_replayable
from spectoolkit.study import Cell, Experiment

GROUPS = ("target", "draft_model", "drafter", "verifier", "sampling", "prompts")
NOT_OF_A_CELL = ("name", "folder", "grid", "cases", "pairs", "study", "worker")
# Graphs change the rounding of a GPU at most, as its kernels do.
NO_EFFECT_ON_NUMBERS = ("target.cache_dir", "target.graphs", "draft_model.graphs")
ENGINES = ("live", "replay", "auto")
OF_THE_TEXT = ("max_new_tokens", "samples_per_prompt", "seed", "ignore_eos", "stop_strings")
OF_PROMPT_LENGTH = ("max_tokens", "too_long")
MOST_DRAFT_TOKENS = 1024

_log = logging.getLogger(__name__)


class Errors:
    """Collects the usage errors of `with errors.collecting:` blocks, each once, instead of raising the first."""

    def __init__(self) -> None:
        self._messages: dict[str, None] = {}

    @property
    def collecting(self) -> Errors:
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, UsageError):
            self._messages[str(error)] = None
            return True
        return False

    def __bool__(self) -> bool:
        return bool(self._messages)

    def raise_all(self) -> None:
        """Raise one error that holds all messages, if there are any."""
        if self._messages:
            raise UsageError("\n".join(self._messages))


class Loaders:
    """Loads each model and prompt set once, however many cells share it."""

    def __init__(self) -> None:
        self.prompts = cache(self._prompts)
        self.target = cache(self._target)
        self.target_with_features = cache(self._target_with_features)
        self.draft_model = cache(self._draft_model)
        self.prefix_cache = cache(self._prefix_cache)
        self.content = cache(_content)
        self.encoded = cache(self._encoded)

    def _prompts(self, node: str) -> tuple[Prompt, ...]:
        made = call(json.loads(node))
        return made if isinstance(made, PromptSet) else tuple(made)

    def _encoded(
        self, node: str, target_node: str, chat_template: bool, rule: LengthRule, max_new_tokens: int
    ) -> tuple[tuple[tuple[Prompt, tuple[int, ...]], ...], dict[str, int]]:
        """The prompts that are used with their tokens, and what was changed or left out on the way, with how often."""
        target, prompts = self.target(target_node), self.prompts(node)

        def encode(prompt: Prompt) -> list[int]:
            return target.tokenizer.encode(prompt, chat_template)

        fitting = fit(prompts, encode, rule, target.context_length - max_new_tokens)
        changes = {**getattr(prompts, "changes", {}), **fitting.changes}
        if changes:
            _log.warning("prompts: %s", "; ".join(f"{count} {what}" for what, count in changes.items()))
        return tuple((prompt, tuple(encode(prompt))) for prompt in fitting), changes

    def _target(self, node: str) -> LanguageModel:
        return call(json.loads(node))

    def _target_with_features(self, node: str, layers: tuple[int, ...]) -> LanguageModel:
        return cast(CausalLM, self.target(node)).with_features(layers)

    def _draft_model(self, target_node: str, node: str) -> LanguageModel | DraftStream:
        return call(json.loads(node), self.target(target_node))

    def _prefix_cache(self, model: LanguageModel, max_tokens: int) -> LanguageModel:
        return PrefixCache(model, max_tokens) if max_tokens > 0 else model


def make_cell(config: Mapping[str, Any], choices: Mapping[str, str], loaders: Loaders, errors: Errors) -> Cell | None:
    """Check one point of a grid; models are loaded only when the cell is built. None if anything is wrong.

    Args:
        config: all settings, resolved, as plain containers.
        choices: the chosen option of every group.
        loaders: shared by the cells of a study.
        errors: takes what is wrong.
    """
    known = {*(key for key, _, _ in _TOP_LEVEL), *GROUPS, *NOT_OF_A_CELL}
    with errors.collecting:
        if unknown := sorted(config.keys() - known):
            raise UsageError(f"unknown settings: {', '.join(unknown)} (there are: {', '.join(sorted(known))})")
    for key, fits, expected in _TOP_LEVEL:
        with errors.collecting:
            if key not in config:
                raise UsageError(f"{key}: expected {expected}, got nothing")
            if not fits(config[key]):
                raise UsageError(f"{key}: expected {expected}, got {config[key]!r}")
    groups = {group: dict(config.get(group) or {}) for group in GROUPS}
    with errors.collecting:
        check_signature("target", groups["target"])
    uses_draft_model = False
    with errors.collecting:
        uses_draft_model = "draft_model" in _parameters("drafter", groups["drafter"])
        if uses_draft_model:
            check_signature("draft_model", groups["draft_model"], provided=("target",))
    params = SamplingParams()
    with errors.collecting:
        params = _sampling_params(groups["sampling"])
    prompts: tuple[Prompt, ...] = ()
    chat_template = groups["prompts"].pop("chat_template", None)
    rule = LengthRule()
    with errors.collecting:
        said = {key: groups["prompts"].pop(key) for key in OF_PROMPT_LENGTH if key in groups["prompts"]}
        rule = LengthRule(**said)
    with errors.collecting:
        if not isinstance(chat_template, bool):
            raise UsageError(f"prompts.chat_template: expected true or false, got {chat_template!r}")
        check_signature("prompts", groups["prompts"])
        prompts = loaders.prompts(_freeze(groups["prompts"]))
        if not prompts:
            raise UsageError(f"prompts={choices['prompts']}: expected at least one prompt, got none")
    verifier, drafter = None, None
    with errors.collecting:
        check_signature("verifier", groups["verifier"])
        verifier = call(groups["verifier"])
    with errors.collecting:
        check_signature("drafter", groups["drafter"], provided=("draft_model", "vocab_size"))
        drafter = _drafter(groups["drafter"], None, 0)
    engine = config.get("engine")
    contents: dict[str, str] = {}
    with errors.collecting:
        if drafter is not None and verifier is not None:
            check_pair(drafter, verifier)
            engine = _engine(engine, drafter, verifier, is_greedy=params.temperature == 0)
        contents = _contents(config, groups, loaders)
    if errors or verifier is None:
        return None

    settings = dict(_flatten({key: value for key, value in config.items() if key not in NOT_OF_A_CELL}))
    settings |= {f"{group}.name": choice for group, choice in choices.items()}
    is_lossless = verifier.is_lossless and not getattr(drafter, "is_negative_control", False)
    settings |= {"verifier.is_lossless": is_lossless, "engine": engine}
    unused = () if uses_draft_model else ("draft_model.",)
    if rule.too_long == "error":  # refusing changes no numbers
        unused += tuple(f"prompts.{key}" for key in OF_PROMPT_LENGTH)
    if engine == "live":
        unused += ("engine", "trajectories")
    contents |= {"prompts.content": _hash(repr(prompts))}
    contents |= {"drafter.code": _code(drafter), "verifier.code": _code(verifier)}
    named = {**settings, **contents}
    identity = {
        key: value for key, value in named.items() if not key.startswith(unused) and key not in NO_EFFECT_ON_NUMBERS
    }
    text_identity = {
        key: value
        for key, value in identity.items()
        if key.startswith(("target.", "sampling.", "prompts.")) or key in OF_THE_TEXT
    }

    def build() -> Experiment:
        target_node = _freeze(groups["target"])
        target, draft_model = loaders.target(target_node), None
        if uses_draft_model:
            draft_model = loaders.draft_model(target_node, _freeze(groups["draft_model"]))
            if layers := as_stream(draft_model).feature_layers:
                target = loaders.target_with_features(target_node, layers)
            else:
                draft_model = loaders.prefix_cache(draft_model, config["prefix_cache_tokens"])
        target = loaders.prefix_cache(target, config["prefix_cache_tokens"])
        clusters: dict[str, str] = {}
        categories: dict[str, str] = {}
        requests: list[Request] = []
        encoded, changes = loaders.encoded(
            _freeze(groups["prompts"]), target_node, bool(chat_template), rule, config["max_new_tokens"]
        )
        for prompt, tokens in encoded:
            for sample in range(config["samples_per_prompt"]):
                request_id = f"{prompt.id}/{sample}"
                clusters[request_id], categories[request_id] = prompt.id, prompt.category
                requests.append(
                    Request(
                        id=request_id,
                        prompt=tokens,
                        max_new_tokens=config["max_new_tokens"],
                        params=params,
                        seed=config["seed"],
                        stop_ids=frozenset() if config["ignore_eos"] else target.tokenizer.stop_ids,
                        stop_strings=tuple(config["stop_strings"]),
                    )
                )
        return Experiment(
            target=target,
            drafter=_drafter(groups["drafter"], draft_model, target.vocab_size),
            verifier=call(groups["verifier"]),
            requests=requests,
            clusters=clusters,
            categories=categories,
            num_draft_tokens=config["num_draft_tokens"],
            batch_size=config["batch_size"],
            prompt_changes=changes,
        )

    def pair_on(draft_model: LanguageModel | None, vocab_size: int) -> tuple[Drafter, Verifier]:
        return _drafter(groups["drafter"], draft_model, vocab_size), call(groups["verifier"])

    return Cell(settings, identity, text_identity, len(prompts) * config["samples_per_prompt"], build, pair_on)


def fits(drafter_node: Mapping[str, Any], verifier_node: Mapping[str, Any]) -> bool:
    """Whether the verifier can judge what the drafter proposes.

    Raises:
        UsageError: one of them cannot be made with its settings.
    """
    check_signature("drafter", drafter_node, provided=("draft_model", "vocab_size"))
    check_signature("verifier", verifier_node)
    drafter, verifier = _drafter(drafter_node, None, 0), call(verifier_node)
    return set(drafter.laws) <= set(verifier.laws)


def _sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    names = inspect.signature(SamplingParams).parameters
    if unknown := sorted(str(key) for key in settings if key not in names):
        raise UsageError(f"sampling: unknown {', '.join(unknown)} (it takes: {', '.join(names)})")
    return SamplingParams(**{**settings, "logit_bias": settings.get("logit_bias") or {}})


def _engine(asked: Any, drafter: Drafter, verifier: Verifier, *, is_greedy: bool) -> Any:
    """ "replay" where that is asked for, or allowed and exact; "live" elsewhere.

    Raises:
        UsageError: a replay was asked for that would not be exact.
    """
    if asked not in ("replay", "auto"):
        return asked
    try:
        check_replayable(drafter, verifier, is_greedy=is_greedy)
    except UsageError:
        if asked == "replay":
            raise
        return "live"
    return "replay"


def _contents(config: Mapping[str, Any], groups: Mapping[str, Any], loaders: Loaders) -> dict[str, str]:
    """What lies behind the paths among the settings, so that a changed file is not taken for the one before.

    Raises:
        UsageError: trajectories that nobody reads, or that are not there.
    """
    found: dict[str, str] = {}
    for group in ("target", "draft_model"):
        for key, value in groups[group].items():
            if isinstance(value, str) and key != "_target_" and value and Path(value).is_dir():
                found[f"{group}.{key}.content"] = loaders.content(value)
    given = config.get("trajectories")
    if isinstance(given, str):
        if config.get("engine") == "live":
            raise UsageError("trajectories: only a replay reads them; say engine=replay or engine=auto")
        if not Path(given).expanduser().is_file():
            raise UsageError(f"trajectories: expected a file, got {given!r}")
        found["trajectories.content"] = loaders.content(str(Path(given).expanduser()))
    return found


def _content(path: str) -> str:
    """A hash of a file's bytes, or of the names, sizes and times of the files in a folder."""
    place = Path(path)
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()[:16]
    files = sorted(file for file in place.rglob("*") if file.is_file())
    return _hash(repr([(str(f.relative_to(place)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]))


def _code(part: object) -> str:
    """A hash of the source of an object's class and its bases, for those who are writing it."""
    return _hash("".join(_source(base) for base in type(part).__mro__ if base is not object))


def _source(base: type) -> str:
    """The source of a class; of one that was typed into a notebook, which no file holds, that of its members."""
    try:
        return inspect.getsource(base)
    except (OSError, TypeError):
        return "".join(_member_source(name, value) for name, value in vars(base).items())


def _member_source(name: str, value: Any) -> str:
    """The source of a method, the value of an attribute; nothing of what Python or `dataclass` adds to a class."""
    member = getattr(value, "__func__", getattr(value, "fget", value))
    if inspect.isfunction(member):
        with suppress(OSError):
            return inspect.getsource(member)
        return ""
    return "" if name.startswith("__") else f"{name}={member!r}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _freeze(node: Mapping[str, Any]) -> str:
    return json.dumps(node, sort_keys=True)


def _drafter(node: Mapping[str, Any], draft_model: LanguageModel | DraftStream | None, vocab_size: int) -> Drafter:
    available = {"draft_model": draft_model, "vocab_size": vocab_size}
    return call(node, **{name: value for name, value in available.items() if name in _parameters("drafter", node)})


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "logit_bias":
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def call(node: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call what `node` names, with its parameters."""
    parameters = {str(key): value for key, value in node.items() if key != "_target_"}
    return find(str(node["_target_"]))(*args, **parameters, **kwargs)


def find(path: str) -> Any:
    """The object called `path`, "package.module.name".

    Raises:
        ImportError, AttributeError, ValueError: there is none.
    """
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def _parameters(group: str, node: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
    """What the class or function of a group takes.

    Raises:
        UsageError: it names none.
    """
    path = node.get("_target_")
    try:
        return inspect.signature(find(str(path))).parameters
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(
            f"{group}._target_: expected the path of a class or function, got {path!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def check_signature(group: str, node: Mapping[str, Any], provided: Sequence[str] = ()) -> None:
    """Refuse parameters that the named class does not take, required ones that are missing, and wrong types.

    Raises:
        UsageError: all of them in one message.
    """
    parameters = _parameters(group, node)
    target = find(str(node["_target_"]))
    has_fields = inspect.isclass(target) and is_dataclass(target)
    hints = get_type_hints(target.__init__ if inspect.isclass(target) and not has_fields else target)
    given = [key for key in node if key != "_target_"]
    unknown = [key for key in given if key not in parameters or key in provided]
    required = [name for name, p in parameters.items() if p.default is p.empty]
    empty = [key for key in given if node[key] == "???"]
    missing = [name for name in required if name not in given and name not in provided]
    taken = [name for name in parameters if name not in provided]
    problems = [f"unknown {key} (it takes: {', '.join(taken) or 'nothing'})" for key in unknown]
    problems += [f"no value for {key}; say {group}.{key}=..." for key in [*missing, *empty]]
    problems += [
        f"{key}: expected {_shown(hints[key])}, got {node[key]!r}"
        for key in given
        if key in hints and key not in (*unknown, *empty) and not _fits(node[key], hints[key])
    ]
    if problems:
        raise UsageError(f"{group} ({node['_target_']}): " + "; ".join(problems))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value out of YAML can be meant for a parameter with this annotation; unknown annotations fit all."""
    kind, arguments = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if kind in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if hint in (int, float):
        is_number = isinstance(value, (int,) if hint is int else (int, float)) and not isinstance(value, bool)
        return is_number and (isinstance(value, float) or abs(value) < 2**63)
    if hint in (str, bool):
        return isinstance(value, hint)
    if kind is Literal:
        return value in arguments
    if kind in (list, tuple, Sequence):
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value if arguments)
    if kind in (dict, Mapping):
        return isinstance(value, dict)
    return True


def _shown(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) and not get_args(hint) else str(hint).replace("typing.", "")


def _is_count(value: Any, most: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


_TOP_LEVEL: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "num_draft_tokens",
        lambda value: _is_count(value, MOST_DRAFT_TOKENS),
        f"an integer from 1 to {MOST_DRAFT_TOKENS}",
    ),
    ("max_new_tokens", _is_count, "an integer >= 1"),
    ("samples_per_prompt", _is_count, "an integer >= 1"),
    ("batch_size", _is_count, "an integer >= 1"),
    ("prefix_cache_tokens", lambda value: _fits(value, int) and value >= 0, "an integer >= 0 (0 keeps none)"),
    ("seed", lambda value: _fits(value, int), "an integer of 64 bits"),
    ("engine", lambda value: value in ENGINES, "live, replay or auto (replay where that is exact, else live)"),
    ("trajectories", lambda value: value is None or _is_text(value), "null or the path of a file"),
    ("ignore_eos", lambda value: isinstance(value, bool), "true or false"),
    ("stop_strings", lambda value: _fits(value, list[str]) and all(value), "a list of non-empty texts"),
    ("name", _is_text, "a text"),
    ("folder", _is_text, "a path"),
    ("worker", lambda value: value is None or _fits(value, int), "null or an integer"),
)
