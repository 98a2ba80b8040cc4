"""Random layers whose experts are to be quantised, for tests of each encoding."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def layer_and_call(draw: st.DrawFn, size: st.SearchStrategy[int], activation: str) -> tuple[dict, dict]:
    """Arguments of `random_problem` for a layer on 1, 2 or 4 ranks, with H and I drawn from `size`, and the options
    `how` of `Ranks.call`."""
    count = draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.integers(1, 24))
    holders = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    problem: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "tokens": draw(st.lists(st.integers(0, 120), min_size=count, max_size=count)),
        "hidden": draw(size),
        "intermediate": draw(size),
        "experts": experts,
        "top_k": draw(st.integers(1, min(6, experts))),
        "dtype": draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"])),
        "fused": draw(st.booleans()),
        "skew": draw(st.sampled_from([0.0, 3.0, 50.0])),
        "scale": draw(st.sampled_from([1.0, 0.03, 8.0])),
        "biases": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "placement": draw(st.none() | st.lists(holders, min_size=experts, max_size=experts)),
        "activation": activation,
        "capacity_factor": draw(st.none() | st.floats(0.05, 3.0)),
        "return_mode": draw(st.sampled_from(["direct", "reduced", "auto"])),
    }
    tile = draw(st.sampled_from([(128, 256), (8, 16)]) | st.tuples(st.integers(4, 128), st.integers(4, 200)))
    return problem, {"perturb": [draw(st.just(0) | st.integers(1, 2**31 - 1))], "tile": tile}
