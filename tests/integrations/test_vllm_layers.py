"""Layers of vLLM that the plugin computes or refuses, made by vLLM's own classes in this process."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import flashmoe
import ml_dtypes
import pytest
import torch

vllm = pytest.importorskip("vllm", reason="there is no vLLM: see `make test-integrations`")

from flashmoe.integrations.vllm import hooks, recognise, register  # noqa: E402
from flashmoe.tolerance import call_error  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers.activation import (  # noqa: E402
    GeluAndMul,
    SiluAndMul,
    SiluAndMulWithClamp,
    SwigluOAIAndMul,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter  # noqa: E402
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: E402
    UnquantizedFusedMoEMethod,
)

H, I, E = 64, 48, 8
LAYERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def plugin():
    register()
    register()  # as vLLM may
    with set_current_vllm_config(VllmConfig()):
        yield


def config(top_k=2, activation=MoEActivation.SILU, dtype=torch.float32, parallel=None, **options) -> FusedMoEConfig:
    sizes = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    more = {"use_ep": False, "all2all_backend": "allgather_reducescatter", "enable_eplb": False}
    return FusedMoEConfig(
        num_experts=E,
        experts_per_token=top_k,
        hidden_dim=H,
        intermediate_size=I,
        num_local_experts=E,
        num_logical_experts=E,
        activation=activation,
        device="cpu",
        routing_method=RoutingMethodType.Default,
        moe_parallel_config=FusedMoEParallelConfig(**sizes | ranks | more | (parallel or {})),
        in_dtype=dtype,
        **options,
    )


class Layer(torch.nn.Module):
    """What vLLM's method asks of the module that has the parameters; they are random, and processed as loaded ones."""

    def __init__(self, moe: FusedMoEConfig, weights_on_input: bool = False) -> None:
        super().__init__()
        self.moe_config, self.activation = moe, moe.activation
        self.apply_router_weight_on_input = weights_on_input
        self.global_num_experts, self.expert_map = moe.num_experts, None
        self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta = moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta
        self.method = UnquantizedFusedMoEMethod(moe)
        assert isinstance(self.method, hooks.FlashMoEMethod)
        self.method.create_weights(self, E, H, I, moe.in_dtype, weight_loader=None)
        random = torch.Generator().manual_seed(1)
        for name, parameter in self.named_parameters():
            scale = 1.0 if name.endswith("bias") else 3.0 / parameter.shape[-1] ** 0.5
            parameter.data = (torch.randn(parameter.shape, generator=random) * scale).to(moe.in_dtype)
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self.method.apply(self, x, topk_weights, topk_ids, None, None)


def routing(tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, and distinct experts with weights, as vLLM's router has them."""
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=random).to(dtype)
    weights, ids = torch.rand(tokens, E, generator=random).topk(top_k)
    return x, ids.to(torch.int32), weights


def expected_of(layer: Layer, act, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum over a token's experts, in float64, with vLLM's own activation."""
    named = {name: parameter.double() for name, parameter in layer.named_parameters()}
    zeros = torch.zeros(E, dtype=torch.float64)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        e, w = ids[t, k], weights[t, k].double()
        row = x[t].double() * (w if layer.apply_router_weight_on_input else 1.0)
        z = named["w13_weight"][e] @ row + named.get("w13_bias", zeros)[e]
        row = named["w2_weight"][e] @ act(z) + named.get("w2_bias", zeros)[e]
        y[t] += row if layer.apply_router_weight_on_input else w * row
    return y


def arrays(*tensors: Tensor):
    return [t.float().numpy().astype(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy() for t in tensors]


LIMIT = 1.5  # within what gates and ups are
CASES = {
    "silu": ({"activation": MoEActivation.SILU}, SiluAndMul),
    "silu, clamped": (
        {"activation": MoEActivation.SILU, "swiglu_limit": LIMIT},
        lambda: SiluAndMulWithClamp(LIMIT),
    ),
    "silu, biases": ({"activation": MoEActivation.SILU, "has_bias": True}, SiluAndMul),
    "gelu": ({"activation": MoEActivation.GELU}, GeluAndMul),
    "gpt-oss's": ({"activation": MoEActivation.SWIGLUOAI, "has_bias": True}, SwigluOAIAndMul),
    "gpt-oss's, halves, other numbers": (
        {
            "activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE,
            "swiglu_limit": LIMIT,
            "swiglu_alpha": 1.3,
            "swiglu_beta": 0.5,
        },
        lambda: SiluAndMulWithClamp(LIMIT, alpha=1.3, beta=0.5),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_within_the_bound_of_its_definition(case, dtype):
    options, activation = CASES[case]
    layer = Layer(config(dtype=dtype, **options))
    for tokens in (1, 70, 0):
        check(layer, activation().forward_native, *routing(tokens, 2, dtype))


def test_weights_that_scale_the_input():
    layer = Layer(config(top_k=1), weights_on_input=True)
    check(layer, SiluAndMul.forward_native, *routing(9, 1, torch.float32))


def check(layer: Layer, act, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    y = layer(x, ids, weights)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if not len(x):
        return
    moe = layer.moe_config
    named = {name: arrays(parameter)[0] for name, parameter in layer.named_parameters()}
    options = recognise.activation_of(moe.activation.value, moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)
    error = call_error(
        *arrays(x),
        named["w13_weight"],
        named["w2_weight"],
        *arrays(ids, weights),
        return_mode="direct",
        placement=[0] * E,
        gate_up_bias=named.get("w13_bias"),
        down_bias=named.get("w2_bias"),
        weights_on_input=layer.apply_router_weight_on_input,
        **options,
    )
    expected = expected_of(layer, act, x, ids, weights)
    assert 0.0 < (y.double() - expected).norm() <= error.bound < 0.05 * expected.norm()


def test_weights_that_change_in_place_are_used():
    layer = Layer(config())
    inputs = routing(5, 2, torch.float32)
    before = layer(*inputs)
    layer.w2_weight.data.mul_(2.0)
    layer.method.process_weights_after_loading(layer)  # as after an update of the weights
    assert torch.equal(layer(*inputs), 2.0 * before)


def test_layers_of_one_shape_share_a_context():
    first, second, other = (Layer(config(top_k=top_k)) for top_k in (2, 2, 3))
    numbers = [each.method.moe_kernel.fused_experts._context.number for each in (first, second, other)]
    assert numbers[0] == numbers[1] != numbers[2]


def test_a_sum_that_its_caller_reduces_is_none_that_is_reduced():
    """vLLM asserts so where a model does the reduction, even of one rank."""
    assert not Layer(config()).method.moe_kernel.output_is_reduced()


REFUSED = {
    "tensors over two ranks": ({"parallel": {"tp_size": 2}}, "tp_size: expected 1, got 2"),
    "experts over two ranks": ({"parallel": {"ep_size": 2, "use_ep": True}}, "ep_size: expected 1, got 2"),
    "tanh": ({"activation": MoEActivation.GELU_TANH}, "activation: expected one of .*, got gelu_tanh"),
    "LoRA": ({"is_lora_enabled": True}, "is_lora_enabled: expected False, got True"),
    "float64": ({"dtype": torch.float64}, "in_dtype: expected one of .*, got float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_when_the_model_is_built(case):
    options, message = REFUSED[case]
    with pytest.raises(flashmoe.InvalidArgument, match=rf"^{message}; FlashMoE does not compute these experts in vLLM"):
        UnquantizedFusedMoEMethod(config(**options))


def test_bits_that_depend_on_no_batch_are_not_promised(monkeypatch):
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^VLLM_BATCH_INVARIANT: expected 0, got 1; "):
        UnquantizedFusedMoEMethod(config())


def test_a_map_of_experts_is_refused():
    layer = Layer(config())
    layer.expert_map = torch.arange(E, dtype=torch.int32)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^expert_map: expected None, got a map of experts to ranks; "):
        layer(*routing(5, 2, torch.float32))


def runner_of(method: object, router: object) -> MoERunner:
    return MoERunner(f"layers.{next(LAYERS)}", config(), router, SimpleNamespace(quant_method=method))


def test_what_the_method_does_not_see_is_refused_by_layer():
    method = UnquantizedFusedMoEMethod(config())
    assert isinstance(runner_of(method, object()), hooks.FlashMoERunner)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^layers\.1: expected unquantised experts, got int; "):
        runner_of(1, object())
    with pytest.raises(flashmoe.InvalidArgument, match=r"^layers\.2: expected a router without zero experts, got Zero"):
        runner_of(method, ZeroExpertRouter.__new__(ZeroExpertRouter))


def test_another_plugin_in_the_same_place_is_named(monkeypatch):
    class Other(UnquantizedFusedMoEMethod):
        pass

    monkeypatch.setitem(op_registry_oot, "UnquantizedFusedMoEMethod", Other)
    with pytest.raises(
        flashmoe.InvalidArgument, match=rf"^Unquan.*: expected no other plugin .*, got {__name__}\.Other; "
    ):
        register()


def test_compiled_models_on_disk_are_of_this_version():
    assert envs.compile_factors()["FLASHMOE_VERSION"] == flashmoe.__version__
