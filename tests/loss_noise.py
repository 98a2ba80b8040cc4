"""Training in 16-bit products, compared with the same training of eager experts in float32.

A run in a 16-bit type rounds every product, and the differences add up from step to step. How far losses and parameters
are then from those of float32 depends on the model, the optimiser and its rate; no formula gives a bound near this
distance. So it is measured: the distance of eager experts in the 16-bit type from eager experts in float32 is called
the noise of a run. FlashMoE's experts round at other places, but about as often, so their distance is of about the same
size. It may be `FACTOR` times the noise, because chance changes it from run to run.

For `tests/tiny_moe.py` and AdamW with rates of 5e-5 to 3e-3, FlashMoE's distances were 0.6 to 1.7 times the noise; in
one of 14 runs the distance of the norms, which have few elements, was 2.2 times the noise. Eager experts had distances
like these when their inner columns were put in another order, which changes how sums are rounded. When the gradient of
`down_proj` or `gate_up_proj` was left out, the distance of this parameter was 5 to 27 times the noise. (AdamW's steps
do not depend on the scale of a gradient, so a factor that is wrong in a whole gradient is not seen here;
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
    """By how much parameters have changed in all steps together: a vector for each kind of matrix, and one for all
    norms."""


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters in float64. All ranks must call this, because sharded parameters are gathered."""
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.named_parameters()}
    return {name: each.detach().double().clone() for name, each in found.items()}


def run_of(losses: Sequence[float], before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Run:
    """`before` and `after`: what `parameters_of` gave before and after all steps."""
    moved: dict[str, list[torch.Tensor]] = {}
    for name, each in after.items():
        kind = "norms" if each.ndim == 1 else re.sub(r"\d+", "*", name)  # all layers' matrices of that name
        moved.setdefault(kind, []).append((each - before[name]).flatten())
    return Run(list(losses), {kind: torch.cat(parts) for kind, parts in moved.items()})


def check_within_noise(ours: Run, eager: Run, exact: Run) -> None:
    """Asserts that `ours` is at most `FACTOR` times as far from `exact` as `eager` is. `eager` and `exact` are runs of
    eager experts: `eager` in the type of `ours`, `exact` in float32."""
    assert len(ours.losses) == len(eager.losses) == len(exact.losses) and all(map(math.isfinite, ours.losses))
    # The noise must be small beside the change of the parameters, or a parameter that has not changed would pass.
    for kind, expected in exact.moved.items():
        assert FACTOR * float((eager.moved[kind] - expected).norm()) < float(expected.norm()), kind
    _check("losses", *(torch.tensor(run.losses, dtype=torch.float64) for run in (ours, eager, exact)))
    for kind, expected in exact.moved.items():
        _check(kind, ours.moved[kind], eager.moved[kind], expected)


def _check(name: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Compares root mean squares over all elements, because chance decides how far off a single element is."""
    noise, off = (float((each - exact).norm()) / math.sqrt(exact.numel()) for each in (eager, ours))
    assert off <= FACTOR * noise, f"{name}: expected at most {FACTOR} times the noise, {noise:.3g}, got {off:.3g}"
