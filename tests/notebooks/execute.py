"""`python -m tests.notebooks.execute`: runs the notebooks again and keeps their outputs, as they are committed.

nbmake runs them, each in a kernel of its own, as the tests do. What would differ the next time is left out: when each
cell ran, and the kernel's version.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbmake.nb_run import NotebookRun

FOLDER = Path(__file__).parents[2] / "notebooks"
CELL_TIMEOUT_S = 300
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> NotebookNode:
    """The notebook with the outputs of a run now, tidied. Raises RuntimeError with the trace of a cell that failed."""
    with own_settings():
        result = NotebookRun(path, CELL_TIMEOUT_S).execute()
    if result.error is not None:
        raise RuntimeError(f"{path.name}, cell {result.error.failing_cell_index}:\n{result.error.trace}")
    return tidied(result.nb)


def tidied(notebook: NotebookNode) -> NotebookNode:
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        cell.get("outputs", [])[:] = merged(cell.get("outputs", []))
        for output in cell.get("outputs", []):
            if "data" in output and {"text/html", "image/svg+xml"} & output.data.keys():
                output.data.pop("text/plain", None)  # where an object lies in memory, for example
    return notebook


def merged(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """The same text in fewer pieces: how a stream is cut depends on time."""
    found: list[NotebookNode] = []
    for output in outputs:
        last = found[-1] if found else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            found.append(output)
    return found


@contextmanager
def own_settings() -> Iterator[None]:
    """The kernel reads and writes no settings, history or runtime files of the user's."""
    names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="rc-nb-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: f"{folder}/{name}" for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def main() -> None:
    for path in [FOLDER / name for name in sys.argv[1:]] or notebooks():
        print(path.name, flush=True)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
