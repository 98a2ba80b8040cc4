"""Hardware counters of a call's kernels, which ncu reads: on one GPU, in a process of its own."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from typing import Any

SECONDS = 120.0
DURATION = "gpu__time_duration.sum"
"""A kernel's time in nanoseconds."""
WARM_UP = 2


def read(call: str, sizes: dict[str, Any], metrics: tuple[str, ...]) -> list[dict[str, float]] | str:
    """The values of `metrics` for each kernel that runs in one call of `call` (``flashmoe``, or a baseline's name); or
    why there are none."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu: not installed"
    # ncu leaves the clocks as they are. It prints values in base units, so that they can be parsed.
    how = ["--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    told = json.dumps({"call": call, "sizes": sizes})
    command = [ncu, *how, "--metrics", ",".join(metrics), sys.executable, "-m", __name__, told]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"ncu: not done after {SECONDS:g} s"
    rows = parsed(done.stdout)
    if done.returncode != 0 or not rows:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "ERR" in line or "rror" in line]
        return f"ncu: {(errors or ['no kernel was counted'])[0].strip()[:200]}"
    return rows


def parsed(printed: str) -> list[dict[str, float]]:
    """The metrics in ncu's CSV, an entry for each kernel. Other lines that ncu or the program printed are left out."""
    lines = printed.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return []
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        value = row["Metric Value"].replace(",", "")
        kernels.setdefault(row["ID"], {})[row["Metric Name"]] = float(value)
    return list(kernels.values())


def main(told: str) -> None:
    """What ncu runs: one rank makes some calls, then one more that ncu counts, between the start and stop of the
    profiler."""
    import torch

    from . import baselines
    from .joining import join
    from .layer import Layer, Sizes
    from .run import Run

    wanted = json.loads(told)
    join("cuda", 0, 1)
    run = Run("cuda", 0, 1, 4)
    layer = Layer(run, Sizes.of(**wanted["sizes"]))
    calls = {"flashmoe": layer}
    if wanted["call"] not in calls:
        calls |= baselines.of_layer(layer, (wanted["call"],))[0]
    for i in range(WARM_UP):
        calls[wanted["call"]](i)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    calls[wanted["call"]](0)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1])
