"""What a wheel carries is what the checkout holds."""

import tomllib
from pathlib import Path

import spectoolkit
from spectoolkit.config import config_folder

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_and_the_configs_are_listed():
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "spectoolkit").rglob("__init__.py")]
    expected = {".".join(folder.parts) for folder in folders} | {"spectoolkit.configs"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected


def test_the_patterns_cover_every_data_file():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for package, folder in (("spectoolkit", ROOT / "spectoolkit"), ("spectoolkit.configs", config_folder())):
        found = {path for pattern in patterns[package] for path in folder.glob(pattern) if path.is_file()}
        code = (".py", ".pyc")
        data = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in code}
        assert found == data


def test_the_version_stands_in_one_place_only():
    assert PROJECT["project"]["version"] == spectoolkit.__version__
