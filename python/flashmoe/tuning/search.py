"""The search of `flashmoe tune`: which candidates are timed, and which of them is taken. It measures nothing itself."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 2
"""Most rounds over all knobs: what is best for one may depend on another."""

Candidate = dict[str, int | str]
"""Values of knobs; what it does not name is as built in. So the empty one is all that is built in."""


@dataclass(frozen=True)
class Timing:
    """Times of one candidate's calls."""

    median: float
    """Milliseconds."""
    spread: float
    """Milliseconds from the lower to the upper quartile."""

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        """Of at least two calls."""
        lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, upper - lower)

    def beats(self, other: Timing) -> bool:
        """Whether it is shorter by more than either spread."""
        return other.median - self.median > max(self.spread, other.spread)


@dataclass(frozen=True)
class Step:
    """Candidates that were timed in turn, hence under the same clocks. The first is the built-in one."""

    title: str
    candidates: tuple[Candidate, ...]
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Outcome:
    """What a search has found."""

    steps: tuple[Step, ...]
    best: Candidate
    """The built-in one, unless another has beaten it in the last step."""
    timing: Timing
    built_in: Timing
    """In turn with `timing`."""


Measure = Callable[[Sequence[Candidate]], Sequence[Timing]]
"""Times candidates in turn."""


def search(knobs: Mapping[str, Sequence[int | str]], measure: Measure) -> Outcome:
    """One knob after the other, the best of its values and the built-in one is taken, if it beats what was best so far;
    until none changes, or after `SWEEPS` rounds. At last the best is timed against the built-in one once more: times
    that have chosen it flatter it. Asks for at most `most_timings` timings.
    """
    best: Candidate = {}
    steps: list[Step] = []
    settled = 0  # knobs, one after the other, for which nothing better than the best was found
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
    """How many timings a search asks for at most."""
    line = 2  # the built-in candidate, and the best without this knob
    return SWEEPS * sum(line + len(values) for values in knobs.values()) + 2


def _line(best: Candidate, name: str, values: Sequence[int | str]) -> list[Candidate]:
    """The built-in candidate, `best`, and `best` with any other value of one knob; each once."""
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
