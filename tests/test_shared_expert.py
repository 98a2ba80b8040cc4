"""The shared expert: an FFN that every token goes through, beside its K experts and in the same call."""

from __future__ import annotations

from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe.contexts.memory import plan_memory
from flashmoe.errors import HeapError, InvalidArgument
from layer_options import WITH_SHARED
from problems import Ranks, check, random_problem

SIZES = {"hidden": 48, "intermediate": 24, "experts": 16, "top_k": 4}
TOKENS = [65, 0, 7, 33]

LAYERS = WITH_SHARED | {"given routing": {"shared": 2, "shared_gate": True, "fused": False}}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers(ranks: Ranks, layer: dict[str, Any], count: int):
    problem = random_problem(3, TOKENS[:count], **SIZES | layer)
    check(problem, ranks.call(problem))
    check(problem, ranks.call(problem, tile=(16, 8)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
def test_types_and_returns(ranks: Ranks, return_mode: str, dtype: str):
    layer = SIZES | {"shared": 3, "shared_gate": True, "dtype": dtype, "return_mode": return_mode}
    problem = random_problem(4, TOKENS, **layer)
    check(problem, ranks.call(problem, perturb=(1,)))


@pytest.mark.parametrize("placement", [[0] * 16, [1] * 16], ids=["all on the first", "all on the second"])
def test_a_rank_without_experts_has_the_shared_one(ranks: Ranks, placement: list[int]):
    problem = random_problem(5, [20, 30], placement=placement, shared=2, **SIZES)
    for outcome in (ranks.call(problem), ranks.call(problem, perturb=(2,))):
        check(problem, outcome)


def test_the_bits_do_not_depend_on_how_many_ranks_there_are(ranks: Ranks):
    layer = SIZES | {"dtype": "bfloat16", "return_mode": "direct", "shared": 3, "shared_gate": True}
    whole = random_problem(6, [64], **layer)
    (alone,) = ranks.call(whole)
    parts = random_problem(6, [64], **layer)
    parts.x = [whole.x[0][:10], whole.x[0][10:10], whole.x[0][10:63], whole.x[0][63:]]
    split = np.concatenate([outcome.y for outcome in ranks.call(parts)])
    np.testing.assert_array_equal(split, alone.y)


def test_the_routed_part_keeps_its_routing_and_its_report(ranks: Ranks):
    """With a shared expert, ranks send one another no more rows, because each computes it for its own tokens."""
    plain = random_problem(7, [40, 24], **SIZES)
    more = random_problem(7, [40, 24], **SIZES, shared=2)
    more.router = plain.router
    for before, after in zip(ranks.call(plain), ranks.call(more), strict=True):
        np.testing.assert_array_equal(before.report.topk_ids, after.report.topk_ids)
        np.testing.assert_array_equal(before.report.topk_weights, after.report.topk_weights)
        assert before.report.rows_sent == after.report.rows_sent
        assert before.report.dropped == after.report.dropped == 0
        assert after.report.tile_rows == before.report.tile_rows + before.report.tokens


def test_a_context_serves_layers_with_and_without(ranks: Ranks):
    made_for = random_problem(8, [50, 30], **SIZES, shared=3).limits()
    problems = [
        random_problem(seed, [seed % 50, 30], **SIZES, shared=seed % 4, shared_gate=seed % 4 > 1)
        for seed in range(9, 29)
    ]
    for problem, outcomes in zip(problems, ranks.calls(problems, made_for), strict=True):
        check(problem, outcomes)


def test_the_plan_is_what_a_context_takes():
    sizes = {"max_tokens": 100, "shared_intermediate": 96, "processors": 2, **SIZES}
    plan = plan_memory(ranks=1, **sizes)
    with flashmoe.Context(**sizes) as context:
        assert (context.heap_bytes, context.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
    assert plan.total_bytes > plan_memory(ranks=1, **sizes | {"shared_intermediate": 0}).total_bytes


def _call(context: flashmoe.Context, **changed: Any) -> Any:
    problem = random_problem(9, [5], **SIZES, shared=2)
    return flashmoe.moe(context, **problem.arguments(0) | changed)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"shared_down": None}, "shared_down: expected a tensor beside shared_gate_up, got None"),
        (
            {"shared_gate_up": None, "shared_down": None, "shared_gate": np.ones((1, 48), np.float32)},
            "shared_gate_up: expected a tensor beside shared_gate, got None",
        ),
        (
            {"shared_down": np.ones((48, 30), np.float32)},
            "shared_down: expected Is a multiple of I=24, got Is=30",
        ),
        (
            {"shared_down": np.ones((47, 48), np.float32)},
            r"shared_down: expected \[H=48, Is=48\] float32, got \[47, 48\] float32",
        ),
        (
            {"shared_gate_up": np.ones((48, 48), np.float32)},
            r"shared_gate_up: expected \[2Is=96, H=48\] float32, got \[48, 48\] float32",
        ),
        (
            {"shared_gate": np.ones((2, 48), np.float32)},
            r"shared_gate: expected \[1, H=48\] float32, got \[2, 48\] float32",
        ),
        ({"shared_gate": np.ones(48, np.float32)}, r"shared_gate: expected \[1, H\], got \[48\]"),
        ({"shared_gate": np.ones((1, 48), np.float16)}, "shared_gate: expected float32, the type of x"),
        (
            {"down_bias": np.ones((16, 48), np.float32)},
            "down_bias: expected none beside a shared expert, got one",
        ),
        (
            {"shared_gate": np.ones((1, 48), np.float32), "weights_on_input": True},
            "shared_gate: expected none with weights_on_input, got one",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], told: str):
    with flashmoe.Context(max_tokens=8, dtype="float32", shared_intermediate=48, **SIZES) as context:
        with pytest.raises(InvalidArgument, match=told):
            _call(context, **changed)
        _call(context)


def test_ids_of_slices_are_no_experts(ranks: Ranks):
    """Within a call, ids of E and above stand for the shared expert's slices; but a caller may not give such ids."""
    problem = random_problem(10, [9, 9], **SIZES, shared=2, fused=False)
    problem.topk_ids[1][3, 2] = 17
    with pytest.raises(Exception, match=r"topk_ids: expected ids in \[0, E=16\), or -1 for none, got 17"):
        ranks.call(problem)


def test_a_context_without_room_refuses():
    told = "shared_down: expected an Is of at most 1 I=24, as the context's"
    with (
        flashmoe.Context(max_tokens=8, dtype="float32", shared_intermediate=24, **SIZES) as context,
        pytest.raises(HeapError, match=told),
    ):
        _call(context)


def test_a_gpu_has_room_for_32_choices_of_a_token():
    with pytest.raises(
        InvalidArgument, match="shared_intermediate: expected at most 28 times I=24, got 700, 30 times I"
    ):
        plan_memory(engine="cuda", ranks=1, max_tokens=8, shared_intermediate=700, **SIZES)


def test_a_module_loads_a_block_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = transformers.Qwen2MoeConfig(
        hidden_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=72,
        num_experts=16,
        num_experts_per_tok=4,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = Qwen2MoeSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(40, 48)
    with flashmoe.Context(max_tokens=64, dtype="float32", shared_intermediate=72, **SIZES) as context:
        from flashmoe.nn import MoE

        module = MoE(context, **SIZES, renormalize=False, shared_intermediate=72, shared_gate=True)
        module.load_state_dict(block.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(module(x), block(x[None])[0], rtol=1e-5, atol=1e-5)
        again = MoE(context, **SIZES, renormalize=False, shared_intermediate=72, shared_gate=True)
        again.load_state_dict(module.state_dict())
        with torch.no_grad():
            assert torch.equal(again(x), module(x))
        for wrong, told in (
            ({"shared_intermediate": 70}, "shared_intermediate: expected a multiple of I=24, got 70"),
            ({"shared_gate": True}, "shared_gate: expected False without shared_intermediate, got True"),
        ):
            with pytest.raises(InvalidArgument, match=told):
                MoE(context, **SIZES, **wrong)
