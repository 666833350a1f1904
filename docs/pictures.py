"""Make the pictures of docs/notebooks.md: run its blocks as a notebook would, and save what it would show.

    python docs/pictures.py

Chromium, which must be installed as `chromium`, renders HTML. Look at the pictures before you commit them.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

DOCS = Path(__file__).resolve().parent
#: A block, or a picture that shows what the block before it returned.
PART = re.compile(
    r"^```python\n(?P<code>.*?)^```$|!\[[^\]]*\]\(images/(?P<name>\w+)\.png\)", re.DOTALL | re.MULTILINE
)
LIGHT, DARK = ("#ffffff", "#222222"), ("#111111", "#dddddd")
WIDTH, HEIGHT, MARGIN = 1000, 1000, 8
COLOURS = 128


def main() -> None:
    """Make all pictures."""
    page = (DOCS / "notebooks.md").read_text()
    names: dict[str, Any] = {}
    shown: Any = None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for part in PART.finditer(page):
            if part["code"]:
                shown = run(part["code"], names)
            else:
                colours = DARK if part["name"].endswith("_dark") else LIGHT
                save(picture_of(shown, colours), DOCS / "images" / f"{part['name']}.png")


def run(code: str, names: dict[str, Any]) -> Any:
    """Run a block; return the value of its last expression, which a notebook shows."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "notebooks.md", "exec"), names)
    return eval(compile(ast.Expression(last.value), "notebooks.md", "eval"), names) if last else None


def picture_of(value: Any, colours: tuple[str, str]) -> Image.Image:
    """Return what a notebook with these colours of background and text shows for a value."""
    if hasattr(value, "_repr_png_"):
        return Image.open(io.BytesIO(value._repr_png_())).convert("RGB")
    return render(value._repr_html_(), *colours)


def render(html: str, background: str, colour: str) -> Image.Image:
    """Return a piece of HTML as Chromium draws it, without the empty space around it."""
    style = f"background: {background}; color: {colour}; font: 13px sans-serif; margin: {MARGIN}px"
    Path("cell.html").write_text(f'<!doctype html><meta charset="utf-8"><body style="{style}">{html}</body>')
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    command = ["chromium", *options, "--screenshot=cell.png", Path("cell.html").resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    with Image.open("cell.png") as file:
        picture = file.convert("RGB")
    empty = Image.new("RGB", picture.size, background)
    _, _, right, bottom = ImageChops.difference(picture, empty).getbbox() or (0, 0, 1, 1)
    return picture.crop((0, 0, min(WIDTH, right + MARGIN), min(HEIGHT, bottom + MARGIN)))


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture with a palette, which takes half the space."""
    path.parent.mkdir(exist_ok=True)
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(DOCS.parent)}: {picture.size}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
