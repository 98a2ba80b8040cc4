"""Adds pages to the documentation site whose source lies outside docs/, and mends links to them. mkdocs.yml names this
file as its hooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Files in the root of the repository, and the pages that they become."""
EXAMPLES = ("train_parallel", "train_tiny_moe", "generate", "rollouts")


def _as_page(text: str) -> str:
    """The text of a file of the root, with its links changed so that they are right from docs/."""
    text = re.sub(r"(\]\()docs/", r"\1", text)
    return text.replace("](README.md", "](index.md").replace("](LICENSE)", "](LICENSE.txt)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_as_page((ROOT / source).read_text())))
    files.append(File.generated(config, "LICENSE.txt", content=(ROOT / "LICENSE").read_text()))
    for name in EXAMPLES:
        code = (ROOT / "examples" / f"{name}.py").read_text()
        content = f"# {name}.py\n\n```python\n{code}```\n"
        files.append(File.generated(config, f"examples/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes a page's links to examples lead to the examples' pages."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", rf"]({up}examples/\1.md)", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Replaces the theme's stand-in for a Worker (iframe-worker), which the theme would fetch from another site, by a
    file of this project."""
    up = "../" * page.file.dest_uri.count("/")
    return re.sub(r'src="https://[^"]*/iframe-worker/[^"]*"', f'src="{up}assets/file_worker.js"', output)
