"""Which calls of several ranks use the kernel for a few tokens. Only values that all ranks agree on decide it, such as
max_tokens."""

from __future__ import annotations

import pytest
from fake_gpu import SIZES, H
from fake_group import put_by
from flashmoe import jit
from flashmoe.contexts.memory import plan_memory

FEW = {"max_tokens": 21, "return_mode": "direct", "tokens": 20}
"""Three ranks with max_tokens each have 252 rows, on average 15.75 per expert. The kernel takes at most 16."""


@pytest.mark.parametrize("tokens", [0, 1, 21])
def test_few_tokens_of_several_ranks(cubin, tokens):
    """All calls of a context of so few tokens use the kernel for a few tokens, even on a rank without tokens."""
    sizes = {name: FEW[name] for name in ("max_tokens", "return_mode")}
    plan = plan_memory(engine="cuda", ranks=3, **{**SIZES, **sizes})
    for seen in put_by(3, {**FEW, "tokens": tokens}, cubin=cubin):
        assert seen.variants == [jit.Variant("bfloat16", "swiglu", few=True, group=True)]
        names = ("few", "geometry", "threads", "cooperative", "tokens", "mapped", "block", "groups")
        assert [seen.launch[name] for name in names] == [1, 1, 384, 1, tokens, 3, 8, [0, 1]]
        assert seen.launch["token_rows"] is None  # its gate reads x without a tensor map
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)


@pytest.mark.parametrize("tokens", [0, 21])
def test_a_promise_in_a_large_context(cubin, tokens):
    """All ranks promise to have few tokens in this call, in a context for many."""
    sizes = {"max_tokens": 4000, "return_mode": "direct"}
    plan = plan_memory(engine="cuda", ranks=3, **{**SIZES, **sizes})
    for seen in put_by(3, {**sizes, "tokens": tokens, "how": {"most_tokens": 21}}, cubin=cubin):
        assert seen.variants == [jit.Variant("bfloat16", "swiglu", few=True, group=True)]
        assert [seen.launch[name] for name in ("few", "threads", "tokens", "mapped")] == [1, 384, tokens, 3]
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)


def test_of_experts_in_fp8(cubin):
    """The gate reads x as it is, without a tensor map. Rows that are sent to other ranks are quantised."""
    for seen in put_by(3, {**FEW, "weight_dtype": "float8_e4m3fn"}, cubin=cubin):
        assert seen.variants == [jit.Variant("bfloat16", "swiglu", quantised=True, few=True, group=True)]
        names = ("few", "geometry", "threads", "cooperative", "mapped", "token_row_bytes", "return_row_bytes")
        assert [seen.launch[name] for name in names] == [1, 1, 416, 1, 3, H + 16, 2 * H]
        assert seen.launch["x_scale"] == 0
        assert seen.launch["token_rows"] is None and seen.launch["gate_up"]["type"] == 0
        assert seen.launch["gate_up_scale"][0] != 0 and seen.launch["down_scale"][0] != 0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 22},
        {"return_mode": "reduced"},
        {"transport": "rdma", "return_mode": "reduced"},
        {"machines": (0, 0, 1)},
        {"how": {"capacity_factor": 2.0}},
        {"max_tokens": 4000, "how": {"most_tokens": 22}},
        {"max_tokens": 4000, "transport": "rdma", "return_mode": "reduced", "how": {"most_tokens": 21}},
    ],
    ids=str,
)
def test_what_the_general_kernel_takes_of_few_tokens(cubin, changes):
    for seen in put_by(3, {**FEW, **changes}, cubin=cubin):
        assert not seen.variants[0].few and (seen.launch["few"], seen.launch["geometry"]) == (0, 1)
