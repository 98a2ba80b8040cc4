"""The Python snippets of README.md and of two pages of docs/, with the code that each needs around it to run.

tests/test_snippets.py runs them; tests/test_types.py has type checkers read them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: Path, language: str) -> list[str]:
    """The contents of the page's fenced blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    page: str
    numbers: tuple[int, ...]
    """The numbers, from 0, of the page's Python blocks that are run as one file."""
    before: str = ""
    """Code in front of the blocks: tensors and imports, which the page leaves to its reader."""
    after: str = ""
    """Code behind the blocks: assertions of types, which type checkers check too, and of values."""
    gpus: int = 0
    """How many GPUs the snippet needs. If it needs several, ``torchrun`` starts a process for each GPU."""

    def code(self) -> str:
        of_page = blocks(ROOT / self.page, "python")
        return "\n".join([self.before, *(of_page[number] for number in self.numbers), self.after])


_TYPES = "from typing import Any, assert_type"
_TENSORS = """
import torch
from typing import assert_type


def random(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(shape, dtype=torch.bfloat16, device="cuda")


x, router = random(8192, 2048), random(128, 2048)
gate_up_proj, down_proj = random(128, 1536, 2048), random(128, 2048, 768)
"""
_SET_DEVICE = """
import os
import torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""
_RESULT = """
assert_type(y, torch.Tensor)
assert y.shape == (8192, 2048) and bool(y.isfinite().all())
"""
_CPU_CALL = """
import flashmoe
import numpy as np

H, I, E = 16, 8, 8
ctx = flashmoe.Context(max_tokens=4, hidden=H, intermediate=I, experts=E, top_k=8, dtype="float32")
x, router = np.ones((4, H), np.float32), np.ones((E, H), np.float32)
gate_up_proj, down_proj = np.ones((E, 2 * I, H), np.float32), np.ones((E, H, I), np.float32)
"""

SNIPPETS = {
    "README: one rank": Snippet(
        "README.md",
        (0,),
        before=_TYPES,
        after="""
    assert_type(y, np.ndarray[tuple[Any, ...], np.dtype[Any]])
    assert y.shape == (T, H)
""",
    ),
    "README: several ranks": Snippet(
        "README.md",
        (0, 1),
        before=_TYPES,
        # Several ranks add K = 4 rows in another order than one: three additions, each rounded by at most 2^-24 of a
        # sum, which is at most 4 rows.
        after="""
    assert_type(ys, list[np.ndarray[tuple[Any, ...], np.dtype[Any]]])
    alone = flashmoe.moe(x, gate_up_proj, down_proj, router=router, top_k=K)
    assert len(ys) == 4 and np.abs(np.concatenate(ys) - alone).max() <= 12 * 2.0**-24 * np.abs(alone).max()
""",
    ),
    "README: one GPU": Snippet("README.md", (2,), before=_TENSORS, after=_RESULT, gpus=1),
    "README: several GPUs": Snippet("README.md", (3,), before=_SET_DEVICE + _TENSORS, after=_RESULT, gpus=2),
    "tracing": Snippet("docs/tracing.md", (0,), before=_CPU_CALL, after="ctx.close()"),
    "several machines": Snippet(
        "docs/several_machines.md", (0,), before="import flashmoe", after="assert ctx.ranks == 1\nctx.close()"
    ),
}
