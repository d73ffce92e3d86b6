"""Run notebooks from the first cell to the last and keep their outputs: python notebooks/run.py [NAME ...]."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    # Times would change with every run, and nobody reads them.
    NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": str(HERE)}}).execute()
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.ipynb"))
    for name in names:
        print(name)
        run(HERE / f"{name}.ipynb")
