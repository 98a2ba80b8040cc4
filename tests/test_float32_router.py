"""A router in float32 beside experts in bfloat16: `flashmoe.nn.MoE`, and layers of checkpoints."""

from __future__ import annotations

import json

import flashmoe
import flashmoe.nn
import numpy as np
import pytest
import torch
from flashmoe.checkpoint import load_layer
from flashmoe.pytorch.routing import route as route_in_torch
from flashmoe.reference.routing import route
from flashmoe.spec import Options
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 32, 24, 8, 3, 40

RULES = {
    "softmax": {},
    "softmax, as it is": {"renormalize": False},
    "bias": {"router_bias": True},
    "sigmoid": {"score": "sigmoid", "routed_scale": 2.5},
    "groups": {"score": "sigmoid", "groups": 4, "top_groups": 2, "choice_bias": True},
    "groups of a softmax": {"groups": 2, "top_groups": 1, "renormalize": False, "choice_bias": True},
    "rounded": {"round_logits": True},
    "capacity": {"capacity_factor": 1.0},
    "shared": {"shared_intermediate": 48, "shared_gate": True},
}


@pytest.fixture(scope="module")
def ctx():
    with flashmoe.Context(
        max_tokens=64,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        experts=EXPERTS,
        top_k=TOP_K,
        dtype="bfloat16",
        shared_intermediate=48,
    ) as made:
        yield made


def layer_of(ctx, rule, dtype=torch.bfloat16):
    torch.manual_seed(1)
    options = {"dtype": dtype, "count_load": True, **rule}
    layer = flashmoe.nn.MoE(ctx, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, **options)
    layer.gate.float()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            values = torch.randn(parameter.shape) * 0.5
            parameter.copy_(values if name.startswith("gate.") else values.bfloat16())
        if layer.gate.choice_bias is not None:
            layer.gate.choice_bias.uniform_(-0.5, 0.5)
    return layer


def tokens_of(dtype=torch.bfloat16):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16().to(dtype)


def routed(layer, x, rule):
    """Logits [T, E], and the experts and combine weights [T, K] that the reference chooses in float64."""
    gate = layer.gate
    how = {"score": "softmax", "renormalize": True, "round_logits": False, "routed_scale": 1.0}
    how |= {"groups": 1, "top_groups": None}
    how |= {name: value for name, value in rule.items() if name in how}
    bias = None if gate.bias is None else gate.bias.detach().numpy()
    of_choice = None if gate.choice_bias is None else gate.choice_bias.numpy()
    x = x.view(torch.uint16).numpy().view("bfloat16") if how["round_logits"] else x.float().numpy()
    return route(x, gate.weight.detach().numpy(), bias, TOP_K, choice_bias=of_choice, **how)


@pytest.mark.parametrize("name", RULES)
def test_it_chooses_and_weighs_in_float32(ctx, name):
    rule, x = RULES[name], tokens_of()
    layer = layer_of(ctx, rule)
    logits, ids, weights = routed(layer, x, rule)
    with torch.no_grad():
        y, got = layer(x, return_router_logits=True)
        tensors = {"shared_gate_up": None, "shared_down": None, "shared_gate": None}
        if layer.shared_expert is not None:
            shared = (layer.shared_expert.gate_up_proj, layer.shared_expert.down_proj, layer.shared_expert_gate.weight)
            tensors = dict(zip(tensors, shared, strict=True))
        expected = flashmoe.moe(
            ctx,
            x,
            layer.experts.gate_up_proj,
            layer.experts.down_proj,
            topk_ids=torch.from_numpy(ids.copy()),
            topk_weights=torch.from_numpy(weights.astype(np.float32)),
            capacity_factor=layer.capacity_factor,
            **tensors,
        )
    np.testing.assert_allclose(got.numpy(), logits, atol=1e-5 if not layer._options.round_logits else 0.05)
    assert torch.equal(layer.load, torch.from_numpy(np.bincount(ids.ravel(), minlength=EXPERTS)))
    # The layer's combine weights differ from the reference's in their last bits, so that a few elements of y round to
    # the neighbouring bfloat16 number.
    assert float((y.float() - expected.float()).norm() / expected.float().norm()) < 2.0**-9


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [1, 2])
def test_experts_with_a_logit_of_minus_infinity_are_not_chosen(score, groups):
    """Whatever their `choice_bias`: two of the experts, which would otherwise be everybody's first choice."""
    random = torch.Generator().manual_seed(3)
    router, bias = torch.randn(EXPERTS, HIDDEN, generator=random), torch.zeros(EXPERTS)
    out = [1, 6]
    bias[out] = -torch.inf
    choice_bias = torch.zeros(EXPERTS).index_fill(0, torch.tensor(out), 2.0)
    how = {"score": score, "groups": groups, "top_groups": groups, "renormalize": True}
    found = route_in_torch(tokens_of(), router, bias, choice_bias, Options(top_k=TOP_K, **how))
    inputs = tokens_of().float().numpy(), router.numpy(), bias.numpy(), TOP_K
    _, ids, weights = route(*inputs, choice_bias=choice_bias.numpy(), **how)
    assert not np.isin(found.ids, out).any()
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4)


def test_bfloat16_would_choose_otherwise(ctx):
    """With the router's weights rounded to bfloat16, some choices differ: the test above would notice it."""
    layer, x = layer_of(ctx, {}), tokens_of()
    ids = routed(layer, x, {})[1]
    with torch.no_grad():
        layer.gate.weight.copy_(layer.gate.weight.bfloat16())
    assert (routed(layer, x, {})[1] != ids).any()


@pytest.mark.parametrize("name", ["softmax", "softmax, as it is", "groups", "sigmoid", "shared"])
def test_gradients_are_those_of_a_layer_in_float32(name):
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        with flashmoe.Context(
            max_tokens=64,
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            experts=EXPERTS,
            top_k=TOP_K,
            dtype=str(dtype).removeprefix("torch."),
            shared_intermediate=48,
        ) as ctx:
            layer, x = layer_of(ctx, RULES[name], dtype), tokens_of(dtype).requires_grad_()
            layer(x).float().square().mean().backward()
            gradients.append({"x": x.grad, **{key: each.grad for key, each in layer.named_parameters()}})
    for key, expected in gradients[0].items():
        got = gradients[1][key]
        assert got is not None and (got.dtype == torch.float32) == key.startswith("gate."), key
        assert float((got.float() - expected).norm() / expected.norm()) < 0.02, key  # bfloat16: 8 significant bits


def test_its_gradient_has_no_main_grad(ctx):
    layer = layer_of(ctx, {})
    layer.main_grad = True
    with pytest.raises(flashmoe.InvalidArgument, match=r"^main_grad: expected False with a router in torch\.float32"):
        layer(tokens_of())


def test_it_compiles_whole(ctx):
    layer, x = layer_of(ctx, {}), tokens_of()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("how", ["bfloat16", "to", "half and back"])
def test_a_bias_of_the_choice_stays_float32(ctx, how):
    layer = flashmoe.nn.MoE(
        ctx, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, score="sigmoid", choice_bias=True, dtype=torch.float16
    )
    layer.gate.choice_bias.uniform_(0.0, 1.0)
    held = layer.gate.choice_bias.clone()
    change = {"bfloat16": lambda: layer.bfloat16(), "to": lambda: layer.to(torch.bfloat16)}
    change.get(how, lambda: layer.half().bfloat16())()
    assert layer.gate.weight.dtype == torch.bfloat16
    assert torch.equal(layer.gate.choice_bias, held) and layer.gate.choice_bias.dtype == torch.float32
    assert layer(tokens_of()).dtype == torch.bfloat16


def test_a_checkpoint_keeps_it(ctx, tmp_path):
    layer = layer_of(ctx, {})
    state = {f"model.layers.0.mlp.{name}": each.detach().clone() for name, each in layer.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_layer(tmp_path / "model.safetensors", top_k=TOP_K)
    assert (loaded.router.dtype.name, loaded.dtype.name, loaded.weight_dtype) == ("float32", "bfloat16", "bfloat16")
    np.testing.assert_array_equal(loaded.router, layer.gate.weight.detach().numpy())
    assert not loaded.options.get("round_logits")
    again = flashmoe.nn.MoE.from_layer(ctx, loaded)
    assert again.gate.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(tokens_of()), layer(tokens_of()))


def test_logits_of_a_router_in_float32_are_not_rounded(ctx, tmp_path):
    layer = layer_of(ctx, {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_experts_per_tok": TOP_K}))
    for dtype, rounded in ((torch.float32, False), (torch.bfloat16, True)):
        layer.gate.to(dtype)
        state = {f"model.layers.0.mlp.{name}": each.detach().clone() for name, each in layer.state_dict().items()}
        save_file(state, tmp_path / "model.safetensors")
        assert load_layer(tmp_path).options.get("round_logits", False) == rounded


def test_another_mixture_is_refused(ctx, tmp_path):
    state = {f"model.layers.0.mlp.{name}": each.clone() for name, each in layer_of(ctx, {}).state_dict().items()}
    for name in state:
        if name.endswith("down_proj"):
            state[name] = state[name].half()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(flashmoe.CheckpointError, match="expected one dtype, got mixed"):
        load_layer(tmp_path / "model.safetensors", top_k=TOP_K)
