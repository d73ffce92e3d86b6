"""The notebooks run, in a small form, and what is committed of them comes from one clean run."""

import atexit
import json
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets import Type
from traitlets.config import Config

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOY = ["target=tabular", "draft_model=tabular", "prompts.limit=4", "max_new_tokens=6"]
SMALL = {
    "01_quickstart": {"settings": TOY},
    "02_temperature_sweep": {},  # reads recorded tables
    "03_draft_temperature": {
        "settings": [*TOY, "grid.sampling.temperature=[0.7]", "grid.drafter.constant=[0.0,0.7,1.0]"]
    },
    "04_your_own_drafter": {"settings": [*TOY, "grid.sampling.temperature=[0.0,0.7]"]},
    "05_paper_figures": {},
}
"""What a notebook's parameters are in the tests; folders of results come on top."""


def read(name: str):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(name: str):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


class Display(DisplayHook):
    """Keeps what the last lines of cells show."""

    def write_format_data(self, format_dict, md_dict=None):
        self.shell.shown.append(format_dict)


class Interpreter(InteractiveShell):
    """IPython without a window system, as far as notebooks need it."""

    displayhook_class = Type(Display)

    def __init__(self, **options):
        self.shown = []
        super().__init__(**options)

    def enable_gui(self, gui=None):
        pass


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    settings = Config()
    settings.HistoryManager.enabled = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        interpreter = Interpreter.instance(config=settings)
        yield interpreter
    interpreter.restore_sys_module_state()
    interpreter.atexit_operations()
    atexit.unregister(interpreter.atexit_operations)
    Interpreter.clear_instance()


@pytest.fixture
def shell(interpreter):
    """A fresh notebook in this process: the toolkit and torch are imported already."""
    interpreter.reset()
    interpreter.shown.clear()
    return interpreter


def run(shell, name: str, parameters: dict) -> list[str]:
    """Run all cells, with these assignments behind those of the parameters cell; returns what each cell printed.

    Fails on an error, and on anything on standard error.
    """
    printed = []
    for cell in code_cells(name):
        source = cell.source
        if "parameters" in cell.metadata.get("tags", ()):
            assert all(re.search(rf"^{key} = ", source, re.M) for key in parameters)
            source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
        with capture_output() as captured:
            result = shell.run_cell(source, store_history=True)
        result.raise_error()
        assert captured.stderr == "", source
        printed.append(captured.stdout)
    return printed


def test_every_notebook_has_its_small_form():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_the_notebook_runs_beside_itself(name, shell, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    before = sorted((ROOT / "notebooks").rglob("*"))
    folder = {"05_paper_figures": "out", "02_temperature_sweep": None}.get(name, "folder")
    printed = run(shell, name, {**SMALL[name], **({folder: str(tmp_path / "results")} if folder else {})})
    assert sorted((ROOT / "notebooks").rglob("*")) == before
    assert any("image/png" in data for data in shell.shown)
    if name == "01_quickstart":
        assert sum("st-decoded" in data.get("text/html", "") for data in shell.shown) == 2
    if name == "04_your_own_drafter":
        right, wrong = (text for text in printed if "exact: " in text)
        assert right.count("exact: True") == 2
        assert "exact: False" in wrong
    if name == "05_paper_figures":
        written = [path.suffix for path in (tmp_path / "results").iterdir()]
        assert sorted(written) == [".pdf", ".pdf", ".png", ".png", ".tex"]
        sizes = re.findall(r"(\d\.\d\d) x .* fonts embedded: True, Type 3 fonts: False", printed[-1])
        assert sizes == ["3.30", "6.90"]


@pytest.mark.parametrize("name", ["02_temperature_sweep", "05_paper_figures"])
def test_the_notebook_finds_the_studies_from_the_top_of_the_repository(name, shell, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for cell in code_cells(name)[:2]:
        with capture_output():
            shell.run_cell(cell.source, store_history=True).raise_error()
    assert shell.user_ns["study"].axes == ("sampling.temperature", "drafter", "verifier")


@pytest.mark.parametrize("name", SMALL)
def test_committed_outputs_come_from_one_clean_run(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [out for cell in cells for out in cell.outputs]
    assert {out.output_type for out in outputs} <= {"execute_result", "display_data", "stream"}
    assert {out.name for out in outputs if out.output_type == "stream"} <= {"stdout"}
    assert any("image/png" in out.get("data", {}) for out in outputs)
    written = json.dumps([{k: v for k, v in out.get("data", {}).items() if k != "image/png"} or out for out in outputs])
    assert not re.findall(r"(?<![\w.<])/(?:work|home|root|tmp|usr|Users)/|[A-Z]:\\\\|Warning|Traceback", written)
    # What one run adds to the file and another changes, without any meaning.
    assert not any(cell.metadata.keys() - {"tags"} for cell in notebook.cells)
    assert notebook.metadata.language_info == {"name": "python"}


def test_a_drafter_of_ones_own_takes_less_than_thirty_lines():
    cells = [cell.source for cell in code_cells("04_your_own_drafter") if "Mistaken" not in cell.source]
    own = [cell for cell in cells if any(word in cell for word in ("(ModelDrafter)", "prove(", "st.register("))]
    assert len(own) == 3
    assert sum(bool(line.strip()) for cell in own for line in cell.splitlines()) < 30
