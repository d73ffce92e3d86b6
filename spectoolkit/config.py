"""Studies out of Hydra configs. The only module, besides `cli`, that knows Hydra.

`plan` composes every cell of a study, checks all of them, and loads no model; `assembly` turns settings into objects.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spectoolkit import assembly
from spectoolkit.assembly import GROUPS, Errors, Loaders, make_cell
from spectoolkit.errors import UsageError
from spectoolkit.files import config_folder
from spectoolkit.progress import progress_bar
from spectoolkit.report import tables
from spectoolkit.report.cells import CellResult, check_shared
from spectoolkit.report.decoded import DecodedTexts
from spectoolkit.runner import LeftToOthers, decoded_texts, missing_requests, run_cells
from spectoolkit.study import Cell, Store

PAIRED = ("drafter", "verifier")
PROVIDED_TO_STUDIES = ("cells", "store", "axes", "config")
LAUNCHERS = {"slurm": "hydra_plugins.hydra_submitit_launcher", "ray": "hydra_plugins.hydra_ray_launcher"}
"""Optional extras of this package, and what they install."""
MOST_CHECKED = 64
"""Points of a multirun that are composed beforehand, to find mistakes early."""


@dataclass(frozen=True, repr=False)
class Plan:
    """A study ready to run: every cell checked, no model loaded.

    `run` does all that the command line does. In a notebook `tables` gives the numbers of any grid without a study's
    files, and `decode` the texts of one cell.

    Attributes:
        config: the composed configuration without the grid's settings, as plain containers.
        axes: keys that the cells differ in; a group is named by its own name.
        study: what is done with the cells, called as study(cells, store, axes=..., config=...).
        worker: the number of this process among those that share the study's cells; None if it does the whole study.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    study: Callable[..., str]
    worker: int | None = None

    def run(self) -> str:
        """Run the study; returns what to show on the console.

        A worker leaves when nothing is left but cells that other workers are computing; the last one writes the tables.
        """
        store = Store(self.folder, waits=self.worker is None)
        try:
            return self.study(self.cells, store, axes=self.axes, config=self.config)
        except LeftToOthers as left:
            return f"worker {self.worker}: {left}"

    def state(self) -> str:
        """How much of the study is on disk."""
        store = Store(self.folder)
        num_missing = sum(not store.has(cell) for cell in self.cells)
        if num_missing:
            return (
                f"{num_missing} of {len(self.cells)} cells are missing in {self.folder}; the same command computes them"
            )
        return f"All {len(self.cells)} cells are done; tables, figure and manifest are in {self.folder}"

    def results(self) -> list[CellResult]:
        """The request rows of every cell; computed and kept in the folder where they are not there yet."""
        store = Store(self.folder)
        with progress_bar(missing_requests(self.cells, store), "request") as bar:
            return run_cells(self.cells, store, bar)

    def tables(self, baseline: Mapping[str, object] | None = None) -> tables.Tables:
        """`results` as tables, differences taken against `baseline`, e.g. {"drafter.name": "argmax"}."""
        return tables.build(self.results(), self.axes, baseline)

    def decode(self, cell: int = 0) -> DecodedTexts:
        """Decode the prompts of `cells[cell]` now, whatever its engine; shows how every token came about."""
        return decoded_texts(self.cells[cell].build())

    def __repr__(self) -> str:
        requests = sum(cell.num_requests for cell in self.cells)
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        return f"<Plan {self.name}: {len(self.cells)} cells{over}, {requests} requests, in {self.folder}>"


def plan(overrides: Sequence[str] = ()) -> Plan:
    """Compose and check the study that `overrides` (Hydra syntax) describe.

    Example:
        plan(["experiment=temperature_sweep", "size=tiny"]).run()

    Raises:
        UsageError: everything that is wrong with the configuration, in one message.
    """
    if isinstance(overrides, str):
        raise UsageError(f"overrides: expected a list of texts, got one text; say plan([{overrides!r}])")
    if not isinstance(overrides, Sequence) or not all(isinstance(override, str) for override in overrides):
        raise UsageError(f"overrides: expected a list of texts, got {overrides!r}")
    compose_once = cache(_compose)  # most points of a grid differ in values only, and composing is slow
    base = _resolved(compose_once(tuple(overrides))[0], {})
    worker = base.pop("worker", None)
    axes = _axes(base.get("grid"))
    cases = _cases(base.get("cases"))
    if base.get("pairs") is not None:
        if cases or any(axis.split(".")[0] in PAIRED for axis in axes):
            raise UsageError("pairs: they vary drafter and verifier themselves, so without cases or a grid of these")
        cases = _pair_cases(base["pairs"], overrides, compose_once)
    varied = list(dict.fromkeys([*axes, *(_axis_of(key) for case in cases for key in case)]))
    _refuse_conflicts(axes, cases, varied, overrides)
    errors, loaders = Errors(), Loaders()
    made: list[Cell | None] = []
    for case, *values in itertools.product(cases or [{}], *axes.values()):
        point = {**dict(zip(axes, values, strict=True)), **case}
        options = tuple(f"{key}={value}" for key, value in point.items() if key in GROUPS)
        settings = {key: value for key, value in point.items() if key not in GROUPS}
        with errors.collecting:
            config, choices = _with_options(compose_once, tuple(overrides), options)
            made.append(make_cell(_resolved(config, settings), choices, loaders, errors))
    cells = tuple(cell for cell in made if cell is not None)
    with errors.collecting:
        if not isinstance(base.get("study"), dict):
            raise UsageError(f"study: expected a mapping with a _target_, got {base.get('study')!r}")
        assembly.check_signature("study", base["study"], PROVIDED_TO_STUDIES)
        if worker is not None and getattr(_module_of(base["study"]), "RUNS_IN_ONE_PROCESS", False):
            raise UsageError(
                f"worker: expected null, since {base['name']} cannot be spread over processes, got {worker}"
            )
        if not errors:
            check_shared(cells, varied)
            _check_study(base["study"], cells, varied)
    errors.raise_all()

    def run_study(*args: Any, **kwargs: Any) -> str:
        return assembly.call(base["study"], *args, **kwargs)

    return Plan(base["name"], Path(base["folder"]).expanduser(), base, tuple(varied), cells, run_study, worker)


def register(group: str, name: str, part: Callable[..., Any], **settings: Any) -> None:
    """Make a class or function of your own, one of a notebook too, an option of a group: then say `GROUP=NAME`.

    What a YAML file in a folder of one's own does, for the present process. The same name again replaces it. Cells are
    named after the code of a class, so that a changed one is computed anew; not after that of functions it calls.

    Args:
        group: "drafter", "verifier", ...
        name: of the option.
        part: defined at the top level of a module or notebook, where it is looked up again by its name.
        settings: its parameters, which overrides and grids may change.

    Raises:
        UsageError: no such group, a name that the toolkit has already, or a part that cannot be found by its name.
    """
    if group not in GROUPS:
        raise UsageError(f"group: expected one of {', '.join(GROUPS)}, got {group!r}")
    if (config_folder() / group / f"{name}.yaml").exists():
        raise UsageError(f"name: expected a new option of {group}, the toolkit has {name!r} already")
    if not callable(part) or not hasattr(part, "__qualname__"):
        raise UsageError(f"part: expected a class or function, got {part!r}")
    path = f"{part.__module__}.{part.__qualname__}"
    if getattr(sys.modules.get(part.__module__), part.__qualname__, None) is not part:
        raise UsageError(f"part: expected a class or function at the top level of its module, got {path}")
    ConfigStore.instance().store(name, {"_target_": path, **settings}, group)


def _check_study(study: Mapping[str, Any], cells: Sequence[Cell], axes: Sequence[str]) -> None:
    """Let the study refuse cells before they are computed: its module's `check(cells, axes, **parameters)`, if any."""
    check = getattr(_module_of(study), "check", None)
    if check is not None:
        check(cells, axes, **{key: value for key, value in study.items() if key != "_target_"})


def _module_of(study: Mapping[str, Any]) -> ModuleType:
    return importlib.import_module(str(study["_target_"]).rsplit(".", 1)[0])


def _with_options(
    compose_once: Callable[[tuple[str, ...]], tuple[DictConfig, dict[str, str]]],
    overrides: tuple[str, ...],
    options: Sequence[str],
) -> tuple[DictConfig, dict[str, str]]:
    """The config with these options of different groups; every option is composed once, however many it meets."""
    if len(options) < 2:
        return compose_once((*overrides, *options))
    config, choices = compose_once((*overrides, options[0]))
    config, choices = copy.deepcopy(config), dict(choices)
    for option in options[1:]:
        group = option.split("=")[0]
        other, chosen = compose_once((*overrides, option))
        with open_dict(config):
            config[group] = copy.deepcopy(other[group])
        choices[group] = chosen[group]
    return config, choices


def _pair_cases(
    pairs: Any,
    overrides: Sequence[str],
    compose_once: Callable[[tuple[str, ...]], tuple[DictConfig, dict[str, str]]],
) -> list[dict[str, Any]]:
    """A case for every drafter and verifier of the config groups whose laws fit.

    A group that the command line chooses an option of stays at it. `pairs` holds settings of options: {drafter: {top_m:
    {keep: 2}}}.

    Raises:
        UsageError: settings of what is no option, an option that its settings do not suffice for, or no pair that fits.
    """
    fixed = {override.split("=")[0].lstrip("+") for override in overrides}
    if fixed.issuperset(PAIRED):
        return []
    made: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}  # per group: a case's part, and what it composes
    settings: dict[Any, Any] = pairs if isinstance(pairs, dict) else {None: {}}
    for group in settings:
        if group not in PAIRED or not all(isinstance(values, dict) for values in (settings[group] or {}).values()):
            raise UsageError(f"pairs: expected settings of options of {' and '.join(PAIRED)}, got {pairs!r}")
    for group in PAIRED:
        given = settings.get(group) or {}
        names = option_names(group, overrides)
        if unknown := sorted(given.keys() - set(names)):
            raise UsageError(f"pairs.{group}: expected options among {', '.join(names)}, got {', '.join(unknown)}")
        parts = [
            {group: name, **{f"{group}.{key}": value for key, value in given.get(name, {}).items()}} for name in names
        ]
        made[group] = []
        for part in [{}] if group in fixed else parts:
            options = [f"{group}={part[group]}"] if part else []
            config, _ = compose_once((*overrides, *options))
            varied = {key: value for key, value in part.items() if key != group}
            made[group].append((part, dict(_resolved(config, varied).get(group) or {})))
    cases = [
        {**one, **other}
        for (one, drafter), (other, verifier) in itertools.product(made["drafter"], made["verifier"])
        if assembly.fits(drafter, verifier)
    ]
    if not cases:
        raise UsageError("pairs: expected a verifier that can judge the drafter's proposals, none of them fits")
    return cases


def option_names(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """The options of a config group, those in folders below it ("folder/name") included.

    Wherever they are found: in the toolkit, in a folder given by --config-dir, or in one of the `hydra.searchpath` that
    `overrides` say.
    """
    with _hydra():
        loader = GlobalHydra.instance().config_loader()

        def found(place: str, kind: ObjectType) -> list[str]:
            return loader.get_group_options(f"{group}{place}", kind, "config", list(overrides))

        def below(place: str) -> Iterator[str]:
            yield from (f"{place}/{name}" for name in found(place, ObjectType.CONFIG))
            for name in found(place, ObjectType.GROUP):
                yield from below(f"{place}/{name}")

        # A name that cannot be said on a command line is no option.
        return sorted(name.removeprefix("/") for name in below("") if re.fullmatch(r"[\w./%+@-]+", name))


def check_launcher(overrides: Sequence[str]) -> None:
    """Refuse a launcher whose package is not there, or Slurm's where Slurm is not.

    Raises:
        UsageError: says what to install.
    """
    for override in overrides:
        key, _, name = override.partition("=")
        extra = "ray" if name.startswith("ray") else "slurm" if name.startswith(("slurm", "submitit")) else None
        if key == "hydra/launcher" and extra is not None and not _is_installed(LAUNCHERS[extra]):
            raise UsageError(
                f"{override}: expected an installed launcher, this one is not; in the toolkit's folder say "
                f"pip install '.[{extra}]'"
            )
        if key == "hydra/launcher" and name.startswith(("slurm", "submitit_slurm")) and shutil.which("srun") is None:
            raise UsageError(f"{override}: expected a machine that can submit to Slurm, there is no srun on this one")


def check_workers(overrides: Sequence[str]) -> None:
    """Refuse a multirun over `worker` that is not over `worker` alone: all workers compute one study.

    Raises:
        UsageError: names what varies besides, or that nothing is left to run.
    """
    swept = list(points(overrides))
    if not swept:
        raise UsageError(f"worker: expected at least one, got none from {' '.join(overrides)}")
    studies = {tuple(o for o in point if not o.startswith("worker=")) for point in swept}
    if len(studies) > 1:
        first, second = sorted(studies)[:2]
        differing = sorted(set(first) ^ set(second))
        raise UsageError(
            f"worker: expected a multirun over worker alone, since all workers compute one study, got more: "
            f"{', '.join(differing)} (a study's own axes are grid.KEY=[..])"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def check_overrides(overrides: Sequence[str]) -> None:
    """Compose what a command line says, so that a wrong group, option or key is found before anything else.

    Of the points of a multirun the first `MOST_CHECKED` are composed.

    Raises:
        UsageError: Hydra's complaint.
    """
    for point in itertools.islice(points(overrides), MOST_CHECKED):
        _compose(point)


def of_the_study(overrides: Sequence[str]) -> list[str]:
    """What is left of a command line without Hydra's own settings, except for where it looks for configs."""
    return [o for o in overrides if not o.lstrip("+~").startswith(("hydra/", "hydra.")) or ".searchpath=" in o]


def points(overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The command lines of a multirun, in its order.

    Raises:
        UsageError: Hydra's complaint.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        choices = [
            [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
            if o.is_sweep_override()
            else [str(o.input_line)]
            for o in parsed
        ]
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(str(error).strip()) from error
    return itertools.product(*choices)


def _hydra() -> AbstractContextManager[Any]:
    """Hydra as the command line has started it, else one that looks into the folder of the toolkit's YAML files."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    return initialize_config_dir(str(config_folder()), version_base="1.3")


def _compose(overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    """The config, and the chosen option of every group."""
    try:
        with _hydra():
            config = compose("config", overrides=list(overrides), return_hydra_config=True)
        chosen: dict[str, Any] = OmegaConf.to_container(config.hydra.runtime.choices)  # type: ignore[assignment]
        for group in GROUPS:
            if not isinstance(chosen.get(group), str):
                raise UsageError(f"{group}: expected one of its options, got {chosen.get(group)!r}")
        with open_dict(config):
            del config["hydra"]
        return config, {group: chosen[group] for group in GROUPS}
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        message = str(error).split("\nConfig search path:")[0].strip()
        raise UsageError(message) from error


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
        plain: Any = OmegaConf.to_container(config, resolve=True)
        return plain
    except OmegaConfBaseException as error:
        raise UsageError(str(error).strip()) from error


_NOTHING = object()


def _axes(grid: Any) -> dict[str, list[Any]]:
    """Every list in `grid` is an axis; its key is the path to it."""
    if not isinstance(grid, dict | None):
        raise UsageError(f"grid: expected a mapping written like the settings that it varies, got {grid!r}")
    axes = dict(_lists_in(grid or {}))
    for key in axes:
        if key.split(".")[0] in assembly.NOT_OF_A_CELL:
            raise UsageError(f"grid.{key}: a grid varies the settings of cells, and {key} belongs to the whole study")
    return axes


def _lists_in(grid: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    for key, value in grid.items():
        if isinstance(value, Mapping):
            yield from _lists_in(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value:
            yield f"{prefix}{key}", value
        else:
            raise UsageError(f"grid.{prefix}{key}: expected a non-empty list of values, got {value!r}")


def _cases(cases: Any) -> list[dict[str, Any]]:
    """Points that a grid cannot say: each case sets several keys at once."""
    cases = [] if cases is None else cases
    if not isinstance(cases, list) or not all(isinstance(case, dict) and case for case in cases):
        raise UsageError(f"cases: expected a list of non-empty mappings from settings to values, got {cases!r}")
    for case in cases:
        for key, value in case.items():
            if key in GROUPS and not isinstance(value, str):
                raise UsageError(f"cases: expected the name of an option for {key}, got {value!r}")
    return cases


def _axis_of(key: str) -> str:
    """A setting of a group that a case chooses belongs to the axis of that group; sampling parameters are their own."""
    group = key.split(".")[0]
    return group if group in GROUPS and group != "sampling" else key


def _refuse_conflicts(
    axes: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], varied: Sequence[str], overrides: Sequence[str]
) -> None:
    """Refuse a setting that is said in two ways at once.

    Raises:
        UsageError: a key that both the grid and the cases set, or an axis that the command line sets as well.
    """

    def meet(one: str, other: str) -> bool:
        return one == other or one.startswith(other + ".") or other.startswith(one + ".")

    for axis, key in itertools.product(axes, dict.fromkeys(key for case in cases for key in case)):
        # A case may set what lies below a group that the grid does not vary, but not what the grid varies.
        if meet(axis, key):
            raise UsageError(f"cases: {key} meets the axis {axis} of the grid; vary it in one of the two")
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        for axis in varied:
            if key == axis or (axis in axes and axis in GROUPS and meet(key, axis)):
                how = (
                    f"grid.{axis}=[...] (or cases=[...], which can set several things at once)"
                    if axis in axes
                    else "cases=[...], which set it"
                )
                raise UsageError(f"{override}: {axis} is an axis of this study; to change its values say {how}")
