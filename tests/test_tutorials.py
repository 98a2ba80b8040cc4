"""The code of the tutorials runs, and prints what the tutorials say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_snippets import ROOT, blocks

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_says(page: Path, tmp_path: Path):
    code = tmp_path / f"tutorial_{page.stem}.py"
    code.write_text("\n".join(blocks(page, "python")))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [sys.executable, code], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "".join(blocks(page, "text"))
