"""For mkdocstrings: parameters are documented as ``name: shape``, where its parser wants a space before the colon."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Shapes(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^([a-z_][\w, ]*): ?(?=\S|$)", r"\1 : ", text, flags=re.MULTILINE)
