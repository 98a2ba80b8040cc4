"""``flashmoe tune``: calls of a random layer on a group of GPUs, timed for one candidate after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .. import jit
from ..launch import RankPool
from ..placement import contiguous, local_experts
from ..spec import GATED
from ..tuning.profiles import Setting
from ..tuning.search import Candidate, Timing
from .device import SeededWeights, put_on

if TYPE_CHECKING:
    import torch

ROUNDS = 4
"""The rounds of a measurement. In each round every candidate is timed, so that a drifting clock affects all alike."""
CALLS = 5
"""The timed calls of a candidate in each round."""
WARM_UP = 3
"""The untimed calls before the timed ones, besides a first call that loads the kernel. The ranks fall into step."""


class Bench:
    """The processes of a group's ranks, a GPU each, kept from one measurement to the next. A context manager."""

    def __init__(self, setting: Setting, activation: str) -> None:
        kernel = setting.dtype, activation
        for each in jit.variants_alone(*kernel) if setting.ranks == 1 else [jit.Variant(*kernel)]:
            jit.compile_kernel(each)  # before ranks wait for one another
        self._setting, self._activation = setting, activation
        self._pool = RankPool(setting.ranks)

    def measure(self, candidates: Sequence[Candidate]) -> list[Timing]:
        """Times of `candidates`, ROUNDS * CALLS calls each. The time of a call is that of its slowest rank. Raises
        `RankFailed` if a candidate cannot be run."""
        arguments = (self._setting, self._activation, list(candidates))
        answers = self._pool.call(time_candidates, [arguments] * self._setting.ranks)
        by_candidate = zip(*answers, strict=True)
        return [Timing.of([max(call) for call in zip(*of_ranks, strict=True)]) for of_ranks in by_candidate]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()


def time_candidates(
    rank: int, ranks: int, name: str, setting: Setting, activation: str, candidates: list[Candidate]
) -> list[list[float]]:
    """In a rank's process: per candidate, milliseconds of ROUNDS * CALLS calls."""
    import torch

    from .. import Context, moe

    sizes = {each: getattr(setting, each) for each in ("hidden", "intermediate", "experts", "top_k", "dtype")}
    torch.cuda.empty_cache()  # frees the weights of the measurement before
    layer = _random_layer(setting, activation, rank)
    torch.cuda.empty_cache()  # contexts cannot use the memory that PyTorch caches
    times: list[list[float]] = [[] for _ in candidates]
    for turn in range(ROUNDS):
        for i, candidate in enumerate(candidates):
            profile = dict(candidate)
            # One context at a time, as a user would have. Its memory is at other addresses each time.
            with Context(
                engine="cuda",
                device=rank,
                rank=rank,
                ranks=ranks,
                name=f"{name}-{turn}-{i}",
                max_tokens=setting.tokens,
                return_mode=profile.pop("return_mode", "auto"),
                profile=profile,
                **sizes,
            ) as context:
                times[i] += _milliseconds(lambda context=context: moe(context, **layer), context.synchronize)
    return times


def _random_layer(setting: Setting, activation: str, rank: int) -> dict[str, Any]:
    """Arguments of `flashmoe.moe`: a router, the same on all ranks, the rank's tokens, and its experts' weights.
    Experts are about equally loaded."""
    import torch

    hidden, inner, dtype = setting.hidden, setting.intermediate, setting.dtype
    own = tuple(local_experts(contiguous(setting.experts, setting.ranks), rank))
    rows = inner * (2 if activation in GATED else 1)
    gate_up_proj, down_proj, router = put_on(
        rank,
        [
            SeededWeights((0, 0), own, rows, hidden, dtype),
            SeededWeights((0, 1), own, hidden, inner, dtype),
            SeededWeights((0, 2), (0,), setting.experts, hidden, dtype),
        ],
    )
    generator = torch.Generator(device="cuda").manual_seed(1 + rank)
    return {
        "x": torch.randn((setting.tokens, hidden), generator=generator, device="cuda").to(router.dtype),
        "gate_up_proj": gate_up_proj,
        "down_proj": down_proj,
        "router": router[0],
        "top_k": setting.top_k,
        "activation": activation,
    }


def _milliseconds(call: Callable[[], torch.Tensor], synchronize: Callable[[], None]) -> list[float]:
    """Times of CALLS calls, which follow one another without a gap, as long as the host keeps ahead of the GPU."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    call()
    synchronize()
    for _ in range(WARM_UP):
        call()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(marks)]
