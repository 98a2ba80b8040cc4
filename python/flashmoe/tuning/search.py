"""The search of `flashmoe tune`: which candidates are timed, and which of them is chosen. The caller does the
timing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 2
"""The most rounds over all knobs: the best value of one knob may depend on another."""

Candidate = dict[str, int | str]
"""Values of knobs. A knob that is not named has its built-in value, so the empty candidate is the built-in order."""


@dataclass(frozen=True)
class Timing:
    """Times of one candidate's calls."""

    median: float
    """Milliseconds."""
    spread: float
    """Milliseconds from the lower to the upper quartile."""

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        """The timing of at least two calls."""
        lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, upper - lower)

    def beats(self, other: Timing) -> bool:
        """Whether this median is shorter than the other's by more than the larger of both spreads."""
        return other.median - self.median > max(self.spread, other.spread)


@dataclass(frozen=True)
class Step:
    """Candidates that were timed in turn, so that all ran at the same clocks. The first is the built-in one."""

    title: str
    candidates: tuple[Candidate, ...]
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Outcome:
    """What a search has found."""

    steps: tuple[Step, ...]
    best: Candidate
    """The built-in candidate, unless another has beaten it in the last step."""
    timing: Timing
    built_in: Timing
    """The built-in candidate's timing, measured in turn with `timing`."""


Measure = Callable[[Sequence[Candidate]], Sequence[Timing]]
"""Times candidates in turn."""


def search(knobs: Mapping[str, Sequence[int | str]], measure: Measure) -> Outcome:
    """Tries one knob after the other. The best of its values (the built-in one included) is taken if it beats the best
    candidate so far. This ends when no knob changes, or after `SWEEPS` rounds. At the end the best candidate is timed
    against the built-in one once more, because it may have been chosen only for times that were short by chance. Asks
    for at most `most_timings` timings."""
    best: Candidate = {}
    steps: list[Step] = []
    settled = 0  # knobs tried since `best` last changed, with the one that changed it
    for name, values in itertools.chain(*itertools.repeat(knobs.items(), SWEEPS)):
        if settled == len(knobs):
            break
        step = _timed(name, _line(best, name, values), measure)
        chosen = _chosen(step, best)
        settled = settled + 1 if chosen == best else 1
        best = chosen
        steps.append(step)
    if best:
        steps.append(_timed("once more", [{}, best], measure))
        best = _chosen(steps[-1], {})
    last = steps[-1]
    return Outcome(tuple(steps), best, last.timings[last.candidates.index(best)], last.timings[0])


def most_timings(knobs: Mapping[str, Sequence[int | str]]) -> int:
    """The most timings that a search asks for."""
    line = 2  # the built-in candidate, and the best without this knob
    return SWEEPS * sum(line + len(values) for values in knobs.values()) + 2


def _line(best: Candidate, name: str, values: Sequence[int | str]) -> list[Candidate]:
    """The built-in candidate, `best`, and `best` with each other value of one knob; each candidate once."""
    others = {key: value for key, value in best.items() if key != name}
    candidates: list[Candidate] = []
    for candidate in ({}, others, best, *({**others, name: value} for value in values)):
        if candidate not in candidates:
            candidates.append(candidate)
    return candidates


def _timed(title: str, candidates: list[Candidate], measure: Measure) -> Step:
    return Step(title, tuple(candidates), tuple(measure(candidates)))


def _chosen(step: Step, best: Candidate) -> Candidate:
    """The step's fastest candidate if it beats `best`, else `best`."""
    before = step.timings[step.candidates.index(best)]
    fastest = min(range(len(step.timings)), key=lambda i: step.timings[i].median)
    return step.candidates[fastest] if step.timings[fastest].beats(before) else best
