"""The reference's gradients against PyTorch's autograd of the layer in float64, and against finite differences."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from flashmoe.reference import moe_gradients, moe_reference
from random_layers import CASES, random_call

torch = pytest.importorskip("torch")

WITHOUT_GRADIENT = ("topk_ids", "choice_bias")


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case):
    tensors, options = random_call(np.random.default_rng(1), **CASES[case])
    rng = np.random.default_rng(2)
    grad = rng.standard_normal(tensors["x"].shape)
    leaves = {name: torch.tensor(each) for name, each in tensors.items()}
    for name, each in leaves.items():
        if name not in WITHOUT_GRADIENT:
            each.requires_grad_()
    result = moe_reference(**tensors, **options)
    y, logits = _layer(leaves, options, result.topk_ids)
    np.testing.assert_allclose(y.detach().numpy(), result.y, rtol=1e-12, atol=1e-12)
    loss, logits_grad = (y * torch.tensor(grad)).sum(), None
    if logits is not None:
        logits_grad = rng.standard_normal(tuple(logits.shape))
        loss = loss + (logits * torch.tensor(logits_grad)).sum()
    loss.backward()
    found = moe_gradients(grad, **tensors, **options, logits_grad=logits_grad)
    assert set(found) == set(tensors) - set(WITHOUT_GRADIENT)
    for name, each in found.items():
        np.testing.assert_allclose(each, leaves[name].grad.numpy(), rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_slopes(case):
    """Each tensor's gradient agrees with a central difference along a random direction of the tensor. (The router's
    logits get no gradient of their own here.)"""
    tensors, options = random_call(np.random.default_rng(3), **CASES[case])
    rng = np.random.default_rng(4)
    grad = rng.standard_normal(tensors["x"].shape)
    found = moe_gradients(grad, **tensors, **options)
    step = 1e-6
    for name, each in found.items():
        direction = rng.standard_normal(each.shape)
        ends = [
            (moe_reference(**(tensors | {name: tensors[name] + side * step * direction}), **options).y * grad).sum()
            for side in (1.0, -1.0)
        ]
        slope = (ends[0] - ends[1]) / (2.0 * step)
        size = np.abs(each * direction).sum()
        assert abs(slope - (each * direction).sum()) <= 1e-7 * (1.0 + size), name


def test_an_expert_without_rows_gets_zeros():
    tensors, options = random_call(np.random.default_rng(5), given=True, biases=True, top_k=2)
    tensors["topk_ids"][:] = [4, 1]
    found = moe_gradients(np.ones(tensors["x"].shape), **tensors, **options)
    for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
        assert not found[name][[0, 2, 3, 5]].any() and found[name][[1, 4]].all(axis=0).any()


def _layer(of: dict[str, Any], options: dict[str, Any], kept: np.ndarray) -> tuple[Any, Any]:
    """y and the router's logits, by PyTorch operators. The layer is written independently of the reference, except that
    the experts that compute are the reference's (`kept`)."""
    transposed = options.get("transposed", False)
    matrices = ("gate_up_proj", "down_proj", "shared_gate_up", "shared_down")
    up, down, shared_up, shared_down = (of[name].mT if name in of and transposed else of.get(name) for name in matrices)
    logits, on_input = None, options.get("weights_on_input", False)
    if "router" in of:
        logits = torch.nn.functional.linear(of["x"], of["router"], of.get("router_bias"))
        weights = _weights(logits, of, options)
    else:
        weights = {(t, int(e)): of["topk_weights"][t, k] for (t, k), e in np.ndenumerate(of["topk_ids"].numpy())}
    rows = []
    for t, row in enumerate(of["x"]):
        total = torch.zeros_like(row)
        for e in kept[t]:
            if e < 0:
                continue
            weight, into = weights[t, int(e)], row
            z = up[e] @ (weight * into if on_input else into)
            a = _activation(z if "gate_up_bias" not in of else z + of["gate_up_bias"][e], options)
            f = down[e] @ a if "down_bias" not in of else down[e] @ a + of["down_bias"][e]
            total = total + (f if on_input else weight * f)
        if shared_down is not None:
            f = shared_down @ _activation(shared_up @ row, options)
            total = total + (f if "shared_gate" not in of else torch.sigmoid(of["shared_gate"][0] @ row) * f)
        rows.append(total)
    return torch.stack(rows), logits


def _weights(logits: Any, of: dict[str, Any], options: dict[str, Any]) -> dict[tuple[int, int], Any]:
    """The combine weights of each token's chosen experts, including dropped ones, by token and expert."""
    sigmoid = options.get("score") == "sigmoid"
    g = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    by = g.detach() + of["choice_bias"].detach() if "choice_bias" in of else g.detach()
    if options.get("groups", 1) > 1:
        best = by.reshape(len(by), options["groups"], -1).topk(2, -1).values.sum(-1)
        keep = torch.zeros_like(best).scatter(1, best.topk(options["top_groups"], -1).indices, 1.0)
        by = by.masked_fill(keep.repeat_interleave(by.shape[1] // options["groups"], 1) == 0, -math.inf)
    weights = {}
    for t, ids in enumerate(by.topk(options["top_k"], -1).indices):
        total = g[t, ids].sum() + (1e-20 if sigmoid else 0.0) if options.get("renormalize", True) else 1.0
        for e in ids.tolist():
            weights[t, e] = options.get("routed_scale", 1.0) * g[t, e] / total
    return weights


def _activation(z: Any, options: dict[str, Any]) -> Any:
    name, functional = options.get("activation", "swiglu"), torch.nn.functional
    plain = {
        "relu": torch.relu,
        "relu2": lambda v: torch.relu(v) ** 2,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
    }
    if name in plain:
        return plain[name](z)
    gate, up = (z[::2], z[1::2]) if options.get("interleaved") else z.chunk(2)
    if name != "clamped_swiglu":
        return plain[{"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[name]](gate) * up
    gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
    return gate * torch.sigmoid(options["alpha"] * gate) * (up + options["up_offset"])
