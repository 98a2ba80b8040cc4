"""The trained model that the package ships, on GPUs: text and perplexity are those of Transformers' eager experts.

The model's own router chooses; `flashmoe.moe` computes the experts, for the text in float32 without tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flashmoe
import pytest
import ranks as on_rank
import torch
from flashmoe.launch import RankPool

pytest.importorskip("transformers")

from shipped import ALIKE, PROMPTS, WINDOW, loaded, losses_of, perplexity, text_of, windows
from transformers.integrations.moe import ExpertsInterface

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = {"max_tokens": WINDOW, "hidden": 256, "intermediate": 128, "experts": 16, "top_k": 4}


@pytest.fixture(scope="module", params=(1, 2, 4), ids="{}ranks".format)
def pool(request) -> Iterator[RankPool]:
    here = torch.cuda.device_count() * on_rank.RANKS_A_GPU
    if here < request.param:
        pytest.skip(f"{request.param} GPUs needed, {here} here (FLASHMOE_SHARE_GPUS=2 lets two ranks share one)")
    with RankPool(request.param) as made:
        yield made


def eager_on(rank: int, dtype: torch.dtype) -> torch.nn.Module:
    return loaded(dtype=dtype, experts_implementation="eager").to(f"cuda:{on_rank.device_of(rank)}")


def compute_by(context: flashmoe.Context, model: torch.nn.Module, **options: Any) -> None:
    """Lets the group compute the model's experts, each on the rank that owns it, though this rank has all weights."""
    mine = context.local_experts()

    def forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        weights = module.gate_up_proj[mine], module.down_proj[mine]
        routing = {"topk_ids": top_k_index, "topk_weights": top_k_weights}
        return flashmoe.moe(context, hidden_states.contiguous(), *weights, **routing, **options)

    ExpertsInterface.register("of_group", forward)
    model.set_experts_implementation("of_group")


def written(rank: int, ranks: int, name: str) -> tuple[str, str]:
    """The text that the model writes from the rank's prompt with the group's experts, and with eager experts."""
    model = eager_on(rank, torch.float32)
    expected = text_of(model, PROMPTS[rank])
    with on_rank.joined(rank, ranks, name, **SIZES, dtype="float32") as context, torch.no_grad():
        compute_by(context, model, exact=True)
        return text_of(model, PROMPTS[rank]), expected


def read(rank: int, ranks: int, name: str) -> tuple[float, float]:
    """The sum of losses over the rank's windows of the passage, with the group's experts and with eager experts."""
    mine = windows()[rank::ranks]
    model = eager_on(rank, torch.bfloat16)
    expected = losses_of(model, mine)
    with on_rank.joined(rank, ranks, name, **SIZES, dtype="bfloat16") as context:
        compute_by(context, model)
        return losses_of(model, mine), expected


def test_it_writes_what_eager_experts_write(pool: RankPool):
    assert not torch.backends.cuda.matmul.allow_tf32
    for text, expected in pool.call(written, [()] * pool.ranks, timeout=280.0):
        assert text == expected
        assert len(set(text.split())) > 20  # the text is not a few words again and again


def test_it_foretells_a_passage_as_well_as_eager_experts(pool: RankPool):
    ours, theirs = (sum(losses) for losses in zip(*pool.call(read, [()] * pool.ranks, timeout=280.0), strict=True))
    assert 15.0 < perplexity(theirs) < 30.0
    assert perplexity(ours) == pytest.approx(perplexity(theirs), rel=ALIKE)
