"""The losses of the shipped model in further training: with this package's experts, in one process and in several, and
with eager experts.

    python benchmarks/training_curves.py [--steps 200] [--ranks 4] --out FILE.json

Needs Transformers and safetensors. Each curve is a run of examples/train_parallel.py on the passage that the package
ships, on which the model was not trained before. All runs have float32, AdamW, and the same windows in the same
order. A difference is that of a loss, in nats a token, from the loss with eager experts at the same step.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from flashmoe.bench.origin import ROOT, commit_option, write
from harness import described_on_cpu

EXAMPLE = ROOT / "examples" / "train_parallel.py"
BATCH, WINDOW = 4, 64
"""The number of windows in a step, and the number of tokens in a window."""
EAGER = "eager"
BOUND = 1e-3
"""The most by which losses may differ at every tenth step, in nats a token."""


def assets() -> pathlib.Path:
    import flashmoe

    return pathlib.Path(flashmoe.__file__).parent / "assets"


def passage() -> str:
    """The 2048 tokens that the package ships, as text."""
    from safetensors import safe_open
    from tokenizers import Tokenizer

    with safe_open(assets() / "tiny-qwen3-moe-hidden-states.safetensors", "np") as file:
        ids = file.get_tensor("token_ids").tolist()
    return Tokenizer.from_file(str(assets() / "tiny-qwen3-moe" / "tokenizer.json")).decode(ids)


def losses(text: pathlib.Path, experts: str, ranks: int, steps: int) -> list[float]:
    """The losses of all steps of one run."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLE), str(assets() / "tiny-qwen3-moe"), str(text), "--experts", experts]
    command += ["--steps", str(steps), "--batch", str(BATCH), "--window", str(WINDOW)]
    # PyTorch gets one thread: the engine's threads need the cores, and for PyTorch's part of the model one is enough.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found = [line.partition(": ") for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [name for name, _, _ in found] == [f"step {step}" for step in range(steps)], done.stdout
    return [float(loss) for _, _, loss in found]


def differences(curves: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """The largest difference of each curve from that with eager experts: over every tenth step, beginning with the
    first, and over all steps."""
    found = {}
    for name, curve in curves.items():
        if name != EAGER:
            each = [abs(ours - eager) for ours, eager in zip(curve, curves[EAGER], strict=True)]
            found[name] = {"every_tenth_step": max(each[::10]), "every_step": max(each)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4, help="of the run on several")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    commit_option(parser)
    args = parser.parse_args()

    import transformers

    runs = {EAGER: (EAGER, 1), "flashmoe, 1 rank": ("flashmoe", 1)}
    runs[f"flashmoe, {args.ranks} ranks"] = ("flashmoe", args.ranks)
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "passage.txt"
        text.write_text(passage(), encoding="utf-8")
        curves = {name: losses(text, *run, args.steps) for name, run in runs.items()}
    result: dict[str, Any] = {
        **described_on_cpu(args.commit),
        "transformers": transformers.__version__,
        "steps": args.steps,
        "batch": BATCH,
        "window": WINDOW,
        "largest_difference": differences(curves),
        "losses": curves,
    }
    write(args.out, result)
    for name, largest in result["largest_difference"].items():
        print(f"{name}: {largest['every_tenth_step']:.1e} at every tenth step, {largest['every_step']:.1e} at any")
    if any(largest["every_tenth_step"] > BOUND for largest in result["largest_difference"].values()):
        raise SystemExit(f"expected at most {BOUND:g} at every tenth step")


if __name__ == "__main__":
    main()
