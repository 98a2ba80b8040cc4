"""Changes docstrings for mkdocstrings. They document parameters as ``name: shape``, but its parser needs a space before
the colon. And where they list the options of a table, the site has a link to the page of options instead."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Shapes(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value.replace("{options}", "options:\n        See [options](options.md).")
            obj.docstring.value = re.sub(r"^([a-z_][\w, ]*): ?(?=\S|$)", r"\1 : ", text, flags=re.MULTILINE)
