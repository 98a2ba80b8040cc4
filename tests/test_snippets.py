"""The code snippets of pages run as they stand, because users copy them. tests/test_types.py runs type checkers on
them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_snippets import ROOT, SNIPPETS, blocks

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs(name: str, tmp_path: Path):
    snippet = SNIPPETS[name]
    if (found := torch.cuda.device_count()) < snippet.gpus:
        pytest.skip(f"the snippet {name!r} did not run: it needs {snippet.gpus} GPUs, and there are {found}")
    code = tmp_path / "example.py"
    code.write_text(snippet.code())
    command, environment = [sys.executable, str(code)], dict(os.environ)
    if snippet.gpus > 1:
        ranks = ["--standalone", "--nproc-per-node", str(snippet.gpus)]
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, str(code)]
    elif "from_launcher" in snippet.code():
        environment |= {"RANK": "0", "WORLD_SIZE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200)
    assert ran.returncode == 0, ran.stderr


def test_every_snippet_of_readme_is_there():
    listed = {number for each in SNIPPETS.values() if each.page == "README.md" for number in each.numbers}
    assert listed == set(range(len(blocks(ROOT / "README.md", "python"))))
