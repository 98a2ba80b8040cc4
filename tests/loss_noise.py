"""Training in 16-bit products, compared with the same training of eager experts in float32.

A run in a 16-bit type rounds every product, and later steps add up what earlier ones have changed. What that makes of
losses and parameters depends on the model, the optimiser and its rate: no bound in closed form is near it. So it is
measured. The distance of eager experts in the 16-bit type from eager experts in float32 is the noise of a run.
FlashMoE's experts round at other places, about as often, so their distance is of about the same size. `FACTOR` is the
room that chance gets.

For `tests/tiny_moe.py` and AdamW with rates of 5e-5 to 3e-3, FlashMoE's distances were 0.6 to 1.7 times the noise; once
in 14 runs, of the few elements of the norms, 2.2 times. Eager experts whose inner columns were put in another order,
which rounds other sums, were as far off. Without the gradient of `down_proj` or `gate_up_proj`, that parameter was 5 to
27 times as far off as the noise. (AdamW does not see the size of a gradient that is wrong by one factor everywhere;
tests/test_training.py compares gradients.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

FACTOR = 3.0


class Run(NamedTuple):
    losses: list[float]
    """One for each step."""
    moved: dict[str, torch.Tensor]
    """By how much parameters have changed in all steps: one vector for each kind of matrix, and one for all norms."""


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole ones of shards, so that all ranks call."""
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.named_parameters()}
    return {name: each.detach().double().clone() for name, each in found.items()}


def run_of(losses: Sequence[float], before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Run:
    """`before` and `after`: what `parameters_of` gave before and after all steps."""
    moved: dict[str, list[torch.Tensor]] = {}
    for name, each in after.items():
        kind = "norms" if each.ndim == 1 else re.sub(r"\d+", "*", name)  # the same of all layers
        moved.setdefault(kind, []).append((each - before[name]).flatten())
    return Run(list(losses), {kind: torch.cat(parts) for kind, parts in moved.items()})


def check_within_noise(ours: Run, eager: Run, exact: Run) -> None:
    """`eager` and `exact` are runs of eager experts: in the type of `ours`, and in float32."""
    assert len(ours.losses) == len(eager.losses) == len(exact.losses) and all(map(math.isfinite, ours.losses))
    # Otherwise a parameter that has not moved at all would pass.
    for kind, expected in exact.moved.items():
        assert FACTOR * float((eager.moved[kind] - expected).norm()) < float(expected.norm()), kind
    _check("losses", *(torch.tensor(run.losses, dtype=torch.float64) for run in (ours, eager, exact)))
    for kind, expected in exact.moved.items():
        _check(kind, ours.moved[kind], eager.moved[kind], expected)


def _check(name: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """By root mean squares: single numbers are as far off as chance has it."""
    noise, off = (float((each - exact).norm()) / math.sqrt(exact.numel()) for each in (eager, ours))
    assert off <= FACTOR * noise, f"{name}: expected at most {FACTOR} times the noise, {noise:.3g}, got {off:.3g}"
