"""What a wheel carries is what the checkout holds."""

import tomllib
from pathlib import Path

import yaml

import spectoolkit
from spectoolkit.config import config_folder

ROOT = Path(__file__).parents[2]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
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
    assert PROJECT["project"]["version"] == spectoolkit.__version__ == CITATION["version"]


def test_the_wheel_says_that_it_has_types():
    assert (ROOT / "spectoolkit" / "py.typed").read_bytes() == b""
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["spectoolkit"]


def test_the_citation_is_what_its_schema_asks_for_and_what_the_package_says():
    required = {"cff-version", "message", "title", "authors"}
    assert required <= CITATION.keys() <= required | {"abstract", "type", "version", "license", "keywords"}
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["authors"] == [{"name": "The spectoolkit authors"}]
    assert CITATION["type"] == "software"
    for name in ("license", "keywords"):
        assert CITATION[name] == PROJECT["project"][name]
    assert CITATION["title"] == PROJECT["project"]["name"]
    assert all(isinstance(value, (str, list)) for value in CITATION.values())  # 1.20 would be the number 1.2
