"""Makes docs/options.md from the tables of options and of tensors (flashmoe.spec.options, flashmoe.spec.tensors).

python tools/options_page.py [PAGE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from flashmoe.spec.options import OPTIONS, TYPES, CallOptions, LayerOptions, type_name
from flashmoe.spec.tensors import OPTIONAL

ROOT = Path(__file__).resolve().parents[1]

HEAD = """# Options and tensors of a call

What `flashmoe.moe` takes besides x, gate_up_proj and down_proj, always by keyword. `flashmoe.nn.MoE` takes the same
options, except `most_tokens`, which its calls take. Shapes: T tokens of this rank, H hidden and I intermediate size, E
experts, El this rank's, K experts per token ([glossary](glossary.md)). [models.md](models.md) says which options make
which model's layer.

`python tools/options_page.py` makes this page from `flashmoe.spec.options` and `flashmoe.spec.tensors`, where the
options are declared.
"""


def in_markdown(text: str) -> str:
    return text.replace("``", "`")


def options(names: Iterable[str]) -> str:
    rows = [
        f"| `{name}` | {type_name(TYPES[name])} | `{OPTIONS[name].default!r}` | {in_markdown(OPTIONS[name].text)} |"
        for name in names
    ]
    return "\n".join(["| option | type | default | |", "|---|---|---|---|", *rows])


def page() -> str:
    tensors = [f"| `{name}` | {each.part} | {in_markdown(each.text)} |" for name, each in OPTIONAL.items()]
    return "\n\n".join(
        [
            HEAD.rstrip(),
            "## What a layer computes",
            options(LayerOptions.__annotations__),
            "## How a call is made",
            options(("top_k", *CallOptions.__annotations__, "most_tokens")),
            "## Tensors",
            "\n".join(["| tensor | part | |", "|---|---|---|", *tensors]) + "\n",
        ]
    )


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "options.md").write_text(page())
