"""Functions that tests/gpu/test_refused_gpu.py runs in the processes of a group, one rank in each process."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flashmoe
import torch
from few_ranks import by_general_kernel, first_tokens, own_problem, sizes_of
from flashmoe.calls.refusals import tell
from layers import Problem
from ranks import HALF_A_MILLISECOND, joined, with_experts

LAYERS = 3
Wrong = Callable[[Problem], dict[str, Any]]
WRONG: dict[str, Wrong] = {
    "x: expected": lambda p: {"x": p.x[:, :-8].contiguous()},
    "x: expected at most max_tokens": lambda p: {"x": p.x.repeat(400, 1)},
    "activation: expected": lambda p: {"activation": "nothing"},
    "down_proj: expected": lambda p: {"down_proj": p.down_proj[:0]},
}
"""Wrong arguments for which a rank refuses its call. The keys are how the messages of the errors begin."""


class Told:
    """Compares what a rank is told of calls that other ranks refuse with what it must be told. Refusals arrive as
    errors of a call or of a wait for the device. Such an error covers all refused calls that the rank was not told of
    before: it gives the reason of the first, and says which was the last."""

    def __init__(self) -> None:
        self.refused: dict[int, set[tuple[int, str]]] = {}
        """The refused calls of which this rank was not told yet: by a call's number, the ranks that refused it, and how
        their reasons begin."""
        self.off: list[str] = []
        """What was not as it must be."""

    def hear(self, error: flashmoe.GroupError) -> None:
        if lost := re.match(r"a rank refused call (\d+); its reason is lost", str(error)):
            last = int(lost[1])
        elif said := re.fullmatch(r"rank (\d+) refused call (\d+): (.*?)(; later .* to call (\d+))?", str(error), re.S):
            rank, call, reason, last = int(said[1]), int(said[2]), said[3], int(said[5] or said[2])
            if not any(rank == p and reason.startswith(begins) for p, begins in self.refused.get(call, ())):
                self.off.append(f"{error}; expected one of {self.refused}")
        else:
            self.off.append(str(error))
            return
        if last not in self.refused:
            self.off.append(f"{error}; expected as the last one of {sorted(self.refused)}")
        self.refused = {n: refusers for n, refusers in self.refused.items() if n > last}

    def finish(self, context: flashmoe.Context) -> None:
        """Waits for all calls. After that, the rank must have been told of all refused calls."""
        try:
            context.synchronize()
        except flashmoe.GroupError as error:
            self.hear(error)
        if self.refused:
            self.off.append(f"nothing is told of calls {sorted(self.refused)}")
        self.refused.clear()


def random_calls(
    rank: int, ranks: int, name: str, spec: dict[str, Any], most: int, seed: int, calls: int, lockstep: bool
) -> list[str]:
    """Makes calls with random layers and numbers of tokens; some ranks refuse about a fifth of the calls. lockstep: the
    host waits after every call. Returns a line for each error, missing error or result that is not as it must be."""
    own = [own_problem(rank, ranks, spec, most, seed + n) for n in range(LAYERS)]
    expected = [by_general_kernel(rank, ranks, f"{name}-{n}", each, spec) for n, each in enumerate(own)]
    everybody, told = random.Random(seed), Told()
    results: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    mine = random.Random(seed * ranks + rank)
    with joined(rank, ranks, name, **sizes_of(spec, most)) as context:
        local = [with_experts(each, context.local_experts()) for each in own]
        for n in range(1, calls + 1):
            layer, tokens = everybody.randrange(LAYERS), [everybody.choice((0, 1, 5, most)) for _ in range(ranks)]
            refusers = {p for p in range(ranks) if everybody.random() < 0.5} if everybody.random() < 0.2 else set()
            begins = {p: everybody.choice(list(WRONG)) for p in refusers}
            if mine.random() < 0.2:
                torch.cuda._sleep(mine.randrange(HALF_A_MILLISECOND))
            problem = first_tokens(local[layer], tokens[rank])
            if rank in refusers:
                wrong = WRONG[begins[rank]](first_tokens(local[layer], max(tokens[rank], 1)))
                try:
                    flashmoe.moe(context, **problem.arguments() | wrong)
                    told.off.append(f"call {n}: not refused")
                except flashmoe.FlashMoEError as error:
                    if not str(error).startswith(begins[rank]):
                        told.off.append(f"call {n}: {error}")
            elif refusers:
                told.refused[n] = {(p, begins[p]) for p in refusers}
            try:
                if rank not in refusers:
                    y = flashmoe.moe(context, **problem.arguments())
                    if not refusers:
                        results.append((n, y, expected[layer][: tokens[rank]]))
            except flashmoe.GroupError as error:
                told.hear(error)
            if lockstep or mine.random() < 0.1 or n == calls:
                told.finish(context)
    return told.off + [f"call {n}: other bits" for n, y, right in results if not torch.equal(y, right)]


def gradients(rank: int, ranks: int, name: str, spec: dict[str, Any], tokens: int, mode: str) -> list[str]:
    """Makes training steps (a forward and a backward pass each): one that no rank refuses, then some in which a rank
    refuses the forward pass, some in which a rank refuses the backward pass, and last one that no rank refuses. Returns
    a line for each error that is not as it must be, and the gradients of the last step that differ from the first's."""
    own = own_problem(rank, ranks, spec, tokens, 73)
    off: list[str] = []

    def step(context: flashmoe.Context, problem: Problem, refuses: str = "") -> dict[str, torch.Tensor]:
        leaves = {
            each: getattr(problem, each).detach().clone().requires_grad_()
            for each in ("x", "router", "gate_up_proj", "down_proj")
        }
        given = replace(problem, **leaves).arguments()
        if refuses == "forward":
            given["x"] = given["x"][:, :-8]
        y = flashmoe.moe(context, **given)
        if refuses == "backward":
            error = flashmoe.InvalidArgument("y: no gradient")
            tell(context, error)
            raise error
        y.float().square().sum().backward()
        context.synchronize()
        return {each: leaf.grad for each, leaf in leaves.items()} | {"y": y.detach()}

    with joined(rank, ranks, name, **sizes_of(spec, tokens, return_mode=mode)) as context:
        problem = with_experts(own, context.local_experts())
        first = step(context, problem)
        for number, refuses in ((3, "forward"), (5, "backward")):
            for who in {0, ranks - 1}:
                told = ""
                try:
                    step(context, problem, refuses if rank == who else "")
                except flashmoe.FlashMoEError as error:
                    told = f"{type(error).__name__}: {error}"
                right = "InvalidArgument" if rank == who else f"GroupError: rank {who} refused call "
                if not told.startswith(right):
                    off.append(f"{refuses} {number} of rank {who}: {told!r}")
        try:
            last = step(context, problem)
        except flashmoe.FlashMoEError as error:
            return [*off, f"the last step: {error}"]
    return off + [each for each in first if not torch.equal(first[each], last[each])]


def leave_alone(rank: int, ranks: int, name: str, spec: dict[str, Any], timeout: float) -> str:
    """Rank 0 refuses the second call and makes the third; the others make the second. Rank 1 sleeps before its second
    call until the others have given up. Returns the error that this rank got."""
    own = own_problem(rank, ranks, spec, 20, 74)
    with joined(rank, ranks, name, **sizes_of(spec, 20), timeout=timeout) as context:
        problem = with_experts(own, context.local_experts())
        flashmoe.moe(context, **problem.arguments())
        context.synchronize()
        try:
            if rank == 0:
                tell(context, flashmoe.InvalidArgument("nothing"))
            elif rank == 1:
                time.sleep(3 * timeout)  # until the others have given up
            flashmoe.moe(context, **problem.arguments())
            context.synchronize()
        except flashmoe.FlashMoEError as error:
            return f"{type(error).__name__}: {error}"
    return ""
