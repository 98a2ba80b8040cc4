"""Llama 4, whose blocks FlashMoE patches. tests/test_transformers_fuse.py has the tests for all fused blocks."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flashmoe import InvalidArgument  # noqa: E402
from flashmoe.integrations.transformers import fuse, load_parallel, parallelize, recognise  # noqa: E402
from flashmoe.integrations.transformers.experts import NAME, experts_modules  # noqa: E402
from flashmoe.reference import moe_reference  # noqa: E402
from flashmoe.tolerance import call_error, relative_error  # noqa: E402
from test_transformers import (  # noqa: E402
    PROMPT,
    as_bfloat16,
    assert_same_gradients,
    gradients_of,
    logits_of,
    model_of,
    stored,
    with_experts,
)
from test_transformers_fuse import block_of  # noqa: E402
from test_transformers_parallel import LOAD, ROOM, bits_of, on_ranks, results_of  # noqa: E402, F401


def test_choosing_an_implementation_is_refused_unless_the_blocks_are_fused():
    model = model_of("Llama4")
    refused = r"^Llama4TextMoe: expected experts on Transformers' experts interface, .*; flashmoe.*fuse patches these"
    with pytest.raises(InvalidArgument, match=refused):
        with_experts(model, NAME)
    expected = logits_of(with_experts(model, "eager"), PROMPT)
    assert torch.equal(logits_of(with_experts(fuse(model), NAME), PROMPT), logits_of(model, PROMPT))
    assert (logits_of(model, PROMPT) - expected).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("top_k", [1, 3])
def test_a_bfloat16_block_is_within_the_bound_of_the_reference(top_k):
    block, router = block_of(fuse(model_of("Llama4", torch.bfloat16, num_experts_per_tok=top_k)))
    torch.nn.init.zeros_(block.shared_expert.down_proj.weight)
    x = torch.randn(70, router.weight.shape[1], generator=torch.Generator().manual_seed(3)).bfloat16()
    y, logits = block(x[None])
    scores, expected_logits = router(x)
    assert torch.equal(logits, expected_logits)
    ids = logits.topk(top_k, dim=1).indices
    routing = ids.numpy(), scores.gather(1, ids).float().numpy()
    experts = block.experts
    arrays = [as_bfloat16(each) for each in (x, experts.gate_up_proj, experts.down_proj)]
    how = recognise(experts).how.of_layer()
    assert how["weights_on_input"] and how["transposed"]
    expected = moe_reference(*arrays, topk_ids=routing[0], topk_weights=routing[1], **how)
    error = call_error(*arrays, *routing, return_mode="direct", placement=[0] * experts.num_experts, **how)
    bound = error.bound / expected.scale
    assert 0.0 < relative_error(y.float().numpy(), expected.y, expected.scale) <= bound < 0.05


@torch.no_grad()
def test_the_block_returns_what_transformers_block_returns():
    model = model_of("Llama4")
    block, router = block_of(model)
    x = torch.randn(2, 3, router.weight.shape[1])
    expected = block(x)
    got = block_of(fuse(model))[0](x)
    assert [each.shape for each in got] == [each.shape for each in expected]
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1], expected[1])


def test_gradients_are_those_of_transformers_blocks():
    expected = gradients_of(model_of("Llama4").train(), PROMPT)
    assert_same_gradients(gradients_of(fuse(model_of("Llama4").train()), PROMPT), expected)


def _compare(rank, ranks, folder):
    """Whether a spread model gives the bits of a fused one, for each of the two ways to spread it, and the shares of
    the experts' weights that this rank then has."""
    expected = results_of(fuse(model_of("Llama4")), rank)
    model = model_of("Llama4")
    whole = sum(module.down_proj.numel() for module in experts_modules(model))
    parallelize(model, **ROOM)
    got = results_of(model, rank, synced_gpus=True)
    loaded = load_parallel(folder, **LOAD)
    read = results_of(loaded, rank, synced_gpus=True)
    shares = [sum(each.down_proj.numel() for each in experts_modules(one)) / whole for one in (model, loaded)]
    return got == expected, read == expected, shares


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_model_that_is_spread_gives_the_same_bits(on_ranks, tmp_path, ranks):  # noqa: F811
    model_of("Llama4").save_pretrained(tmp_path)
    for same, read, shares in on_ranks(ranks, _compare, str(tmp_path)):
        assert same and read
        assert shares == [1 / ranks] * 2


def test_a_fused_model_reads_what_an_eager_one_wrote(tmp_path):
    model = model_of("Llama4")
    model.save_pretrained(tmp_path / "eager")
    again = fuse(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "eager").eval())
    assert bits_of(logits_of(again, PROMPT)) == bits_of(logits_of(fuse(model), PROMPT))
    again.save_pretrained(tmp_path / "fused")
    assert stored(tmp_path / "fused") == stored(tmp_path / "eager")
