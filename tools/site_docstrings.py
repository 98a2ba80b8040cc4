"""For mkdocstrings: parameters are documented as ``name: shape``, where its parser wants a space before the colon; and
options that a table describes have a page of their own."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Shapes(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value.replace("{options}", "options:\n        See [options](options.md).")
            obj.docstring.value = re.sub(r"^([a-z_][\w, ]*): ?(?=\S|$)", r"\1 : ", text, flags=re.MULTILINE)
