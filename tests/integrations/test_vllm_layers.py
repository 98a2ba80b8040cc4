"""Layers of vLLM that the plugin computes or refuses, made by vLLM's own classes in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import flashmoe
import ml_dtypes
import numpy as np
import pytest
import torch

vllm = pytest.importorskip("vllm", reason="there is no vLLM: see `make test-integrations`")

from flashmoe.integrations.vllm import hooks, recognise, register  # noqa: E402
from flashmoe.quantize import quantize_weights  # noqa: E402
from flashmoe.reference import moe_reference  # noqa: E402
from flashmoe.tolerance import call_error  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers import quantization  # noqa: E402
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
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter  # noqa: E402
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: E402
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

H, I, E = 64, 48, 8
FP8_H, FP8_I = 192, 256
"""Sizes of layers in FP8, because vLLM wants gates and ups of whole blocks."""
LAYERS = itertools.count()


def replaced() -> dict[str, object]:
    """What the plugin may change in vLLM, as it is now."""
    return {
        "classes": dict(op_registry_oot),
        "quantisation": dict(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG),
        "variables": dict(envs.environment_variables),
    }


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[list[dict[str, object]]]:
    """Puts the plugin in place. Yields vLLM's registries at four times: before; after `register()` without
    FLASHMOE_VLLM=1; after it in a release that is not tried; and after it with FLASHMOE_VLLM=1 in this release."""
    states = [replaced()]
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("FLASHMOE_VLLM", raising=False)
        register()
        states.append(replaced())
        patched.setenv("FLASHMOE_VLLM", "1")
        patched.setattr(vllm, "__version__", "0.34.0")
        register()
        states.append(replaced())
    with set_current_vllm_config(VllmConfig()), pytest.MonkeyPatch.context() as patched:
        patched.setenv("FLASHMOE_VLLM", "1")
        register()
        register()  # as vLLM may
        states.append(replaced())
        # vLLM asks for it where it makes parameters in FP8; there is no process group here.
        patched.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 1)
        yield states


def test_vllm_s_registries_are_untouched_unless_asked(plugin):
    before, unasked, untried, then = plugin
    assert before == unasked == untried
    assert all(then[name] != before[name] for name in before)


def config(
    top_k=2, activation=MoEActivation.SILU, dtype=torch.float32, parallel=None, hidden=H, inner=I, **options
) -> FusedMoEConfig:
    sizes = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    more = {"use_ep": False, "all2all_backend": "allgather_reducescatter", "enable_eplb": False}
    return FusedMoEConfig(
        num_experts=E,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=inner,
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
    "gelu by tanh": ({"activation": MoEActivation.GELU_TANH}, lambda: GeluAndMul(approximate="tanh")),
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


# ---- FP8 -------------------------------------------------------------------------------------------------------------


class Fp8Layer(torch.nn.Module):
    """The same of experts in FP8, whose method is what vLLM's configuration of that name gives them."""

    def __init__(self, moe: FusedMoEConfig, **changes) -> None:
        super().__init__()
        self.moe_config, self.activation = moe, moe.activation
        self.apply_router_weight_on_input = False
        self.global_num_experts, self.expert_map = moe.num_experts, None
        self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta = moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta
        said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        self.method = hooks.FlashMoEFp8Method(get_quantization_config("fp8").from_config(said | changes), self)
        sizes = moe.hidden_dim, moe.intermediate_size
        self.method.create_weights(self, E, *sizes, moe.in_dtype, weight_loader=None)
        random = np.random.default_rng(1)
        for name in ("w13", "w2"):
            weight, scale = getattr(self, f"{name}_weight"), getattr(self, f"{name}_weight_scale_inv")
            matrices = random.standard_normal(weight.shape) * 3.0 / weight.shape[-1] ** 0.5
            elements, scales = quantize_weights(matrices, halves=2 if name == "w13" else 1)
            weight.data = torch.from_numpy(elements.view(np.uint8)).view(torch.float8_e4m3fn)
            assert scale.shape == scales.shape
            scale.data = torch.from_numpy(scales)
        for name in ("w13_bias", "w2_bias"):
            if hasattr(self, name):
                getattr(self, name).data = torch.from_numpy(random.standard_normal(getattr(self, name).shape)).to(
                    moe.in_dtype
                )
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self.method.apply(self, x, topk_weights, topk_ids, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"has_bias": True}, {"swiglu_limit": LIMIT}], ids=["plain", "biases", "limit"])
def test_a_layer_in_fp8_is_within_its_bound(options, dtype):
    layer = Fp8Layer(config(dtype=dtype, hidden=FP8_H, inner=FP8_I, **options))
    random = torch.Generator().manual_seed(2)
    x = torch.randn(70, FP8_H, generator=random).to(dtype)
    weights, ids = torch.rand(70, E, generator=random).topk(2)
    y = layer(x, ids.to(torch.int32), weights)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    (x_array,) = arrays(x)
    elements = [
        each.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) for each in (layer.w13_weight, layer.w2_weight)
    ]
    experts = {
        "gate_up_scale": layer.w13_weight_scale_inv.numpy(),
        "down_scale": layer.w2_weight_scale_inv.numpy(),
        **recognise.activation_of("silu", layer.swiglu_limit, None, None),
    }
    if hasattr(layer, "w13_bias"):
        experts["gate_up_bias"], experts["down_bias"] = arrays(layer.w13_bias, layer.w2_bias)
    routed = ids.numpy(), weights.numpy()
    expected = moe_reference(x_array, *elements, topk_ids=routed[0], topk_weights=routed[1], **experts)
    allowed = call_error(x_array, *elements, *routed, return_mode="direct", placement=[0] * E, **experts)
    error = np.linalg.norm(y.double().numpy() - expected.y)
    assert 0.0 < error <= allowed.bound < 0.05 * np.linalg.norm(expected.y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size: expected None or \[128, 128\], got \[64, 64\]"),
        (
            {"weight_block_size": None, "activation_scheme": "static"},
            "activation_scheme: expected 'dynamic', got 'st.*'",
        ),
        ({"store_dtype": "mxfp4"}, "store_dtype: expected None, got 'mxfp4'"),
    ],
)
def test_experts_in_another_fp8_are_refused_when_the_model_is_built(changes, message):
    with pytest.raises(flashmoe.InvalidArgument, match=rf"^{message}; FlashMoE does not compute these experts in vLLM"):
        Fp8Layer(config(hidden=FP8_H, inner=FP8_I), **changes)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^pcp_size: expected 1, got 2"):
        Fp8Layer(config(parallel={"pcp_size": 2}))


class ScaledLayer(torch.nn.Module):
    """Random experts in FP8 with random scales of a kind, as parameters that vLLM's method has made."""

    def __init__(self, moe: FusedMoEConfig, method_of) -> None:
        super().__init__()
        self.moe_config, self.activation = moe, moe.activation
        self.apply_router_weight_on_input = False
        self.global_num_experts, self.expert_map = moe.num_experts, None
        self.method = method_of(self)
        self.method.create_weights(self, E, moe.hidden_dim, moe.intermediate_size, moe.in_dtype, weight_loader=None)
        random = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                elements = torch.randn(parameter.shape, generator=random) * 16.0
                parameter.data = elements.to(torch.float8_e4m3fn)
            else:
                parameter.data = torch.rand(parameter.shape, generator=random) / 64 + 0.001
        self.loaded = {name: parameter.data.clone() for name, parameter in self.named_parameters()}
        self.method.process_weights_after_loading(self)
        self.method.process_weights_after_loading(self)  # as after an update of the weights

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self.method.apply(self, x, topk_weights, topk_ids, None, None)

    def scales(self, name: str) -> Tensor:
        """As they were loaded, in the shape of `flashmoe.moe`: of blocks, or a row's for each row."""
        scale = self.loaded[f"{name}_{self.method.weight_scale_name}"]
        if scale.ndim == 3:
            return scale
        rows = self.loaded[f"{name}_weight"].shape[1]
        parts = 2 if name == "w13" else 1  # gate above up
        return torch.stack([scale.reshape(E, parts)[:, parts * row // rows] for row in range(rows)], 1).unsqueeze(2)


def own_format(block: list[int] | None):
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"} | ({"weight_block_size": block} if block else {})
    return lambda layer: hooks.FlashMoEFp8Method(get_quantization_config("fp8").from_config(said), layer)


def compressed(strategy: str, activations: str, **more):
    """By vLLM's configuration, as a checkpoint's `config.json` says it."""

    def method_of(layer: torch.nn.Module):
        numbers = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = numbers | {"dynamic": False, "strategy": strategy} | more
        inputs = numbers | {"dynamic": True, "strategy": activations}
        if activations == "group":
            inputs["group_size"] = 128
        said = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": said}}
        routed = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(routed)
        routed.moe_config = layer.moe_config
        names = ("gate", "up", "down")
        routed.ckpt_gate_proj_name, routed.ckpt_up_proj_name, routed.ckpt_down_proj_name = (f"{n}_proj" for n in names)
        kind = get_quantization_config("compressed-tensors")
        return kind.from_config(config).get_quant_method(routed, "model.layers.0.mlp.experts")

    return method_of


SCALED = {
    "own format, tensors": own_format(None),
    "own format, blocks": own_format([128, 128]),
    "compressed-tensors, tensors": compressed("tensor", "tensor"),
    "compressed-tensors, channels": compressed("channel", "token"),
    "compressed-tensors, blocks": compressed("block", "group", block_structure=[128, 128]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SCALED)
def test_scales_of_every_kind(kind, dtype):
    """Gate and up have scales that are far apart, where scales are of tensors: none is quantised once more."""
    layer = ScaledLayer(config(dtype=dtype, hidden=FP8_H, inner=FP8_I), SCALED[kind])
    random = torch.Generator().manual_seed(2)
    x = torch.randn(70, FP8_H, generator=random).to(dtype)
    weights, ids = torch.rand(70, E, generator=random).topk(2)
    y = layer(x, ids.to(torch.int32), weights)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    elements = [
        layer.loaded[f"{name}_weight"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) for name in ("w13", "w2")
    ]
    scales = {"gate_up_scale": layer.scales("w13").numpy(), "down_scale": layer.scales("w2").numpy()}
    routed = ids.numpy(), weights.numpy()
    expected = moe_reference(*arrays(x), *elements, topk_ids=routed[0], topk_weights=routed[1], **scales)
    allowed = call_error(*arrays(x), *elements, *routed, return_mode="direct", placement=[0] * E, **scales)
    error = np.linalg.norm(y.double().numpy() - expected.y)
    assert 0.0 < error <= allowed.bound < 0.05 * np.linalg.norm(expected.y)


@pytest.mark.parametrize(
    ("method_of", "message"),
    [
        (
            compressed("block", "group", block_structure=[64, 128]),
            r"weights.block_structure: expected \[128, 128\], got",
        ),
    ],
)
def test_experts_of_compressed_tensors_in_another_fp8_are_refused(method_of, message):
    with pytest.raises(flashmoe.InvalidArgument, match=rf"^{message}.*; FlashMoE does not compute these experts in vL"):
        ScaledLayer(config(hidden=FP8_H, inner=FP8_I), method_of)


def test_vllm_s_configuration_gives_experts_in_fp8_our_method():
    kind = get_quantization_config("fp8")
    assert kind is hooks.FlashMoEFp8Config
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = config(hidden=FP8_H, inner=FP8_I)
    name = "model.layers.0.mlp.experts"
    assert isinstance(kind.from_config(said).get_quant_method(layer, name), hooks.FlashMoEFp8Method)
    skipped = kind.from_config(said | {"ignored_layers": [name]})
    assert isinstance(skipped.get_quant_method(layer, name), hooks.FlashMoEMethod)


# ---- What holds of both ----------------------------------------------------------------------------------------------


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
    "contexts over two ranks": ({"parallel": {"pcp_size": 2}}, "pcp_size: expected 1, got 2"),
    "relu squared": ({"activation": MoEActivation.RELU2}, "activation: expected one of .*, got relu2"),
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
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^expert_map: expected None without .*, got a map of experts to"
    ):
        layer(*routing(5, 2, torch.float32))


def runner_of(method: object, router: object) -> MoERunner:
    return MoERunner(f"layers.{next(LAYERS)}", config(), router, SimpleNamespace(quant_method=method))


def test_what_the_method_does_not_see_is_refused_by_layer():
    method = UnquantizedFusedMoEMethod(config())
    assert isinstance(runner_of(method, object()), hooks.FlashMoERunner)
    refused = r"^layers\.1: expected experts that are not quantised, or in FP8, got int; "
    with pytest.raises(flashmoe.InvalidArgument, match=refused):
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
    monkeypatch.undo()
    monkeypatch.setitem(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG, "fp8", Other)
    with pytest.raises(
        flashmoe.InvalidArgument, match=rf"^Fp8Config: expected no other plugin .*, got {__name__}\.Other; "
    ):
        register()


def test_compiled_models_on_disk_are_of_this_version():
    assert envs.compile_factors()["FLASHMOE_VERSION"] == flashmoe.__version__
