"""Make the notebook docs/notebooks/first_look.ipynb and the pictures of docs/look.md.

    pip install --group docs
    python docs/pictures.py

The notebook has the blocks of the page up to its section about pandas. It is executed, and the pictures are
what nbconvert shows for the outputs of its cells. Chromium, which must be installed as `chromium`, renders
HTML. Look at the pictures before you commit them. `--notebook` only writes the notebook.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image, ImageChops

DOCS = Path(__file__).resolve().parent
NOTEBOOK = DOCS / "notebooks" / "first_look.ipynb"
#: A block of code, a heading, or a picture that shows what the block before it returned.
PART = re.compile(
    r"^```python\n(?P<code>.*?)^```$|^(?P<heading>#+ .*?)$|!\[[^\]]*\]\(images/(?P<name>\w+)\.png\)",
    re.DOTALL | re.MULTILINE,
)
#: Colours of the background.
LIGHT, DARK = "#ffffff", "#111111"
WIDTH, HEIGHT, MARGIN = 1000, 1000, 8
COLOURS = 128


def main() -> None:
    """Write the notebook, execute it, and make all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebook", action="store_true", help="only write the notebook")
    notebook, names = read_page((DOCS / "look.md").read_text().partition("\n## pandas and Polars\n")[0])
    NOTEBOOK.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, NOTEBOOK)
    if parser.parse_args().notebook:
        return
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, folder)
        for name, number in names.items():
            is_dark = name.endswith("_dark")
            save(picture_of(notebook.cells[number], folder, is_dark), DOCS / "images" / f"{name}.png")


def read_page(page: str) -> tuple[Any, dict[str, int]]:
    """Return a page as a notebook, and for the name of each picture the number of its cell."""
    notebook, names = nbformat.v4.new_notebook(), {}
    for part in PART.finditer(page):
        if part["name"]:
            names[part["name"]] = len(notebook.cells) - 1
            continue
        cells = nbformat.v4
        text = part["heading"] or part["code"].strip()
        cell = cells.new_markdown_cell(text) if part["heading"] else cells.new_code_cell(text)
        cell.id = f"cell-{len(notebook.cells)}"  # not random, so that the file only changes with the page
        notebook.cells.append(cell)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook, names


def execute(notebook: Any, folder: str) -> None:
    """Run the cells of a notebook in a kernel; they get their outputs."""
    from nbclient import NotebookClient

    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()


def picture_of(cell: Any, folder: str, is_dark: bool) -> Image.Image:
    """Return what a notebook shows below a cell."""
    (output,) = [output for output in cell.outputs if output.output_type == "execute_result"]
    if "image/png" in output.data:
        return Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
    return render(html_of(cell, is_dark), Path(folder), DARK if is_dark else LIGHT)


def html_of(cell: Any, is_dark: bool) -> str:
    """Return the outputs of a cell as a page of HTML, with the style of JupyterLab."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        theme="dark" if is_dark else "light",
        exclude_input=True,
        exclude_output_prompt=True,
        mathjax_url="",
        require_js_url="",
        jquery_url="",
    )
    html: str = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))[0]
    return html


def render(html: str, folder: Path, background: str) -> Image.Image:
    """Return a page of HTML as Chromium draws it, without the empty space around it."""
    page, shot = folder / "cell.html", folder / "cell.png"
    page.write_text(html)
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    command = ["chromium", *options, f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    with Image.open(shot) as file:
        picture = file.convert("RGB")
    empty = Image.new("RGB", picture.size, background)
    left, top, right, bottom = ImageChops.difference(picture, empty).getbbox() or (0, 0, 1, 1)
    box = (left - MARGIN, top - MARGIN, right + MARGIN, bottom + MARGIN)
    return picture.crop((*(max(0, edge) for edge in box[:2]), *(min(WIDTH, edge) for edge in box[2:])))


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture with a palette, which takes half the space."""
    path.parent.mkdir(exist_ok=True)
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(DOCS.parent)}: {picture.size}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
