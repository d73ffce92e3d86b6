"""From Hydra configs to objects. The only module, besides `cli`, that knows Hydra.

A group file names a class or function (`_target_`) and its keyword parameters, nothing else; a config object never
enters a class. `plan` composes every cell of a study, checks all of them, and loads no model.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from spectoolkit.datatypes import Request, SamplingParams
from spectoolkit.decode import check_pair
from spectoolkit.errors import UsageError
from spectoolkit.interfaces import Drafter, LanguageModel, Verifier
from spectoolkit.models.prefix_cache import PrefixCache
from spectoolkit.prompts import Prompt
from spectoolkit.replay import check_replayable
from spectoolkit.study import Cell, Experiment, Store

GROUPS = ("target", "draft_model", "drafter", "verifier", "sampling", "prompts")
NOT_OF_A_CELL = ("name", "folder", "grid", "cases", "study")
NO_EFFECT_ON_NUMBERS = ("target.cache_dir",)
ENGINES = ("live", "replay", "auto")
OF_THE_TEXT = ("max_new_tokens", "samples_per_prompt", "seed", "ignore_eos", "stop_strings")


def config_folder() -> Path:
    """The folder of the YAML files: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


@dataclass(frozen=True)
class Plan:
    """A study ready to run: every cell checked, no model loaded.

    Attributes:
        config: the composed configuration without the grid's overrides, as plain containers.
        axes: keys that the grid varies; a group is named by its own name.
        study: what is done with the cells, called as study(cells, store, axes=...).
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    study: Callable[..., str]

    def run(self) -> str:
        """Run the study; returns what to show on the console."""
        return self.study(self.cells, Store(self.folder), axes=self.axes, config=self.config)


def plan(overrides: Sequence[str] = ()) -> Plan:
    """Compose and check the study that `overrides` (Hydra syntax) describe.

    Example:
        plan(["experiment=temperature_sweep", "size=tiny"]).run()

    Raises:
        UsageError: everything that is wrong with the configuration, in one message.
    """
    compose_once = cache(_compose)  # most points of a grid differ in values only, and composing is slow
    base = _resolved(compose_once(tuple(overrides))[0], {})
    axes = dict(_axes(base.get("grid") or {}))
    cases = _cases(base.get("cases") or [])
    varied = list(dict.fromkeys([*axes, *(_axis_of(key) for case in cases for key in case)]))
    _refuse_overridden(varied, overrides)
    errors: dict[str, None] = {}  # insertion-ordered set
    cells: list[Cell] = []
    loaders = _Loaders()
    for case, *values in itertools.product(cases or [{}], *axes.values()):
        point = {**dict(zip(axes, values, strict=True)), **case}
        options = tuple(f"{key}={value}" for key, value in point.items() if key in GROUPS)
        settings = {key: value for key, value in point.items() if key not in GROUPS}
        with _collecting(errors):
            config, choices = compose_once((*overrides, *options))
            cells.append(_cell(_resolved(config, settings), choices, loaders, errors))
    study = base["study"]
    with _collecting(errors):
        _check_signature("study", study, provided=("cells", "store", "axes", "config"))
    if errors:
        raise UsageError("\n".join(errors))

    def run_study(*args: Any, **kwargs: Any) -> str:
        return _call(study, *args, **kwargs)

    return Plan(base["name"], Path(base["folder"]), base, tuple(varied), tuple(cells), run_study)


def check_overrides(overrides: Sequence[str]) -> None:
    """Compose once, so that a wrong group, option or key is found before anything else.

    Raises:
        UsageError: Hydra's complaint.
    """
    _compose(tuple(overrides))


def _compose(overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    """The config, and the chosen option of every group."""
    try:
        if GlobalHydra.instance().is_initialized():
            config = compose("config", overrides=list(overrides), return_hydra_config=True)
        else:
            with initialize_config_dir(str(config_folder()), version_base="1.3"):
                config = compose("config", overrides=list(overrides), return_hydra_config=True)
        choices = {group: config.hydra.runtime.choices[group] for group in GROUPS}
        with open_dict(config):
            del config["hydra"]
        return config, choices
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(str(error).strip()) from error


def _resolved(config: DictConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these settings, as plain containers.

    Raises:
        UsageError: a setting that the config does not have, or an interpolation that cannot be resolved.
    """
    try:
        if settings:
            config = copy.deepcopy(config)
        for key, value in settings.items():
            if OmegaConf.select(config, key, default=_NOTHING, throw_on_missing=False) is _NOTHING:
                raise UsageError(f"{key}: the chosen options have no such setting, so that a grid cannot vary it")
            OmegaConf.update(config, key, value, merge=False)
        return _containers(config)
    except OmegaConfBaseException as error:
        raise UsageError(str(error).strip()) from error


_NOTHING = object()


def _containers(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return plain


def _axes(grid: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every list in `grid` is an axis; its key is the path to it."""
    for key, value in grid.items():
        if isinstance(value, Mapping):
            yield from _axes(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value:
            yield f"{prefix}{key}", value
        else:
            raise UsageError(f"grid.{prefix}{key}: expected a non-empty list of values, got {value!r}")


def _cases(cases: Any) -> list[dict[str, Any]]:
    """Points that a grid cannot say: each case sets several keys at once. Groups come before the keys below them."""
    if not isinstance(cases, list) or not all(isinstance(case, dict) and case for case in cases):
        raise UsageError(f"cases: expected a list of non-empty mappings from settings to values, got {cases!r}")
    return [dict(sorted(case.items(), key=lambda item: "." in item[0])) for case in cases]


def _axis_of(key: str) -> str:
    """A setting of a group that a case chooses belongs to the axis of that group; sampling parameters are their own."""
    group = key.split(".")[0]
    return group if group in GROUPS and group != "sampling" else key


def _refuse_overridden(varied: Sequence[str], overrides: Sequence[str]) -> None:
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        if key in varied:
            raise UsageError(
                f"{override}: {key} is an axis of this study; to change its values say grid.{key}=[...] "
                "(or cases=[...] where the study has cases)"
            )


class _Loaders:
    """Loads each model and prompt set once, however many cells share it."""

    def __init__(self) -> None:
        self.prompts = cache(self._prompts)
        self.target = cache(self._target)
        self.draft_model = cache(self._draft_model)

        self.prefix_cache = cache(self._prefix_cache)

    def _prompts(self, node: str) -> tuple[Prompt, ...]:
        return tuple(_call(_thaw(node)))

    def _target(self, node: str) -> LanguageModel:
        return _call(_thaw(node))

    def _draft_model(self, target_node: str, node: str) -> LanguageModel:
        return _call(_thaw(node), self.target(target_node))

    def _prefix_cache(self, model: LanguageModel, max_tokens: int) -> LanguageModel:
        return PrefixCache(model, max_tokens) if max_tokens > 0 else model


def _freeze(node: Mapping[str, Any]) -> str:
    return json.dumps(node, sort_keys=True)


def _thaw(node: str) -> dict[str, Any]:
    return json.loads(node)


def _cell(config: dict[str, Any], choices: Mapping[str, str], loaders: _Loaders, errors: dict[str, None]) -> Cell:
    """Check one point of the grid; the cell loads models only when it is built."""
    known = {*(key for key, _, _ in _TOP_LEVEL), *GROUPS, *NOT_OF_A_CELL}
    with _collecting(errors):
        if unknown := sorted(config.keys() - known):
            raise UsageError(f"unknown settings: {', '.join(unknown)} (there are: {', '.join(sorted(known))})")
    for key, fits, expected in _TOP_LEVEL:
        with _collecting(errors):
            if not fits(config[key]):
                raise UsageError(f"{key}: expected {expected}, got {config[key]!r}")
    with _collecting(errors):
        _check_signature("target", config["target"])
    uses_draft_model = "draft_model" in _parameters("drafter", config["drafter"])
    if uses_draft_model:
        with _collecting(errors):
            _check_signature("draft_model", config["draft_model"], provided=("target",))
    params = SamplingParams()
    with _collecting(errors):
        params = SamplingParams(**config["sampling"])
    prompt_node = {key: value for key, value in config["prompts"].items() if key != "chat_template"}
    prompts: tuple[Prompt, ...] = ()
    with _collecting(errors):
        if not isinstance(config["prompts"].get("chat_template"), bool):
            raise UsageError("prompts.chat_template: expected true or false")
        _check_signature("prompts", prompt_node)
        prompts = loaders.prompts(_freeze(prompt_node))
        if not prompts:
            raise UsageError(f"prompts={choices['prompts']}: expected at least one prompt, got none")
    verifier, drafter = None, None
    with _collecting(errors):
        _check_signature("verifier", config["verifier"])
        verifier = _call(config["verifier"])
    with _collecting(errors):
        _check_signature("drafter", config["drafter"], provided=("draft_model", "vocab_size"))
        drafter = _drafter(config["drafter"], None, 0)
    with _collecting(errors):
        if drafter is not None and verifier is not None:
            check_pair(drafter, verifier)

    engine = config["engine"]
    with _collecting(errors):
        if drafter is not None and verifier is not None and engine != "live":
            engine = _engine(engine, drafter, verifier, is_greedy=params.temperature == 0)

    settings = dict(_flatten({key: value for key, value in config.items() if key not in NOT_OF_A_CELL}))
    settings |= {f"{group}.name": choice for group, choice in choices.items()}
    settings["verifier.is_lossless"] = verifier.is_lossless if verifier is not None else None
    settings["engine"] = engine
    unused = () if uses_draft_model else ("draft_model.",)
    if engine == "live":
        unused += ("engine", "trajectories")
    identity = {
        key: value for key, value in settings.items() if not key.startswith(unused) and key not in NO_EFFECT_ON_NUMBERS
    }

    text_identity = {
        key: value
        for key, value in identity.items()
        if key.startswith(("target.", "sampling.", "prompts.")) or key in OF_THE_TEXT
    }

    def build() -> Experiment:
        target_node = _freeze(config["target"])
        max_tokens = config["prefix_cache_tokens"]
        target, draft_model = loaders.target(target_node), None
        if uses_draft_model:
            draft_model = loaders.draft_model(target_node, _freeze(config["draft_model"]))
            draft_model = loaders.prefix_cache(draft_model, max_tokens)
        target = loaders.prefix_cache(target, max_tokens)
        clusters: dict[str, str] = {}
        categories: dict[str, str] = {}
        requests: list[Request] = []
        for prompt in prompts:
            tokens = tuple(target.tokenizer.encode(prompt, config["prompts"]["chat_template"]))
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
            drafter=_drafter(config["drafter"], draft_model, target.vocab_size),
            verifier=_call(config["verifier"]),
            requests=requests,
            clusters=clusters,
            categories=categories,
            num_draft_tokens=config["num_draft_tokens"],
            batch_size=config["batch_size"],
        )

    return Cell(settings, identity, text_identity, len(prompts) * config["samples_per_prompt"], build)


def _engine(asked: str, drafter: Drafter, verifier: Verifier, *, is_greedy: bool) -> str:
    """ "replay" where that is exact, "live" elsewhere.

    Raises:
        UsageError: a replay was asked for that would not be exact.
    """
    try:
        check_replayable(drafter, verifier, is_greedy=is_greedy)
    except UsageError:
        if asked == "replay":
            raise
        return "live"
    return "replay"


def _drafter(node: Mapping[str, Any], draft_model: LanguageModel | None, vocab_size: int) -> Drafter:
    available = {"draft_model": draft_model, "vocab_size": vocab_size}
    return _call(node, **{name: value for name, value in available.items() if name in _parameters("drafter", node)})


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "logit_bias":
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parameters(group: str, node: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
    """What the class or function of a group takes.

    Raises:
        UsageError: its `_target_` cannot be imported.
    """
    try:
        return inspect.signature(get_object(node["_target_"])).parameters
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        raise UsageError(
            f"{group}._target_: expected an importable class or function, got {node!r} ({error})"
        ) from error


def _call(node: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    parameters = {str(key): value for key, value in node.items() if key != "_target_"}
    return get_object(node["_target_"])(*args, **parameters, **kwargs)


def _check_signature(group: str, node: Mapping[str, Any], provided: Sequence[str] = ()) -> None:
    """Refuse parameters that the named class does not take, required ones that are missing, and wrong types."""
    parameters = _parameters(group, node)
    hints = get_type_hints(_typed(get_object(node["_target_"])))
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


def _typed(target: Any) -> Any:
    """What carries the annotations of the parameters: a dataclass itself, else the constructor or the function."""
    return target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value out of YAML can be meant for a parameter with this annotation; unknown annotations fit all."""
    kind, arguments = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if kind in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if hint in (int, float):
        return isinstance(value, (int,) if hint is int else (int, float)) and not isinstance(value, bool)
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_TOP_LEVEL: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("num_draft_tokens", _is_count, "an integer >= 1"),
    ("max_new_tokens", _is_count, "an integer >= 1"),
    ("samples_per_prompt", _is_count, "an integer >= 1"),
    ("batch_size", _is_count, "an integer >= 1"),
    ("prefix_cache_tokens", lambda value: value == 0 or _is_count(value), "an integer >= 0 (0 keeps none)"),
    ("seed", lambda value: _fits(value, int) and abs(value) < 2**63, "an integer of 64 bits"),
    ("engine", lambda value: value in ENGINES, "live, replay or auto (replay where that is exact, else live)"),
    ("trajectories", lambda value: value is None or isinstance(value, str), "null or the path of a file"),
    ("ignore_eos", lambda value: isinstance(value, bool), "true or false"),
    ("stop_strings", lambda value: _fits(value, list[str]) and all(value), "a list of non-empty texts"),
    ("name", lambda value: isinstance(value, str) and bool(value), "a text"),
    ("folder", lambda value: isinstance(value, str) and bool(value), "a path"),
)


class _collecting:
    """Collects the usage errors of a block instead of raising them."""

    def __init__(self, errors: dict[str, None]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, UsageError):
            self._errors[str(error)] = None
            return True
        return False
