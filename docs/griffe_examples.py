"""An extension of griffe, which reads docstrings for the site: sections `Example:` are code.

Griffe knows `Examples:` only, and would show the other as running text. `mkdocs.yml` names this module.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section `Example:` of each docstring to `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change a docstring that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub("^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
