"""Layers of Megatron-Core with the operator in them, against Megatron's own `MoELayer` with `SequentialMLP`, on CPUs.

Megatron is written for GPUs. Its calls that ask for the current GPU are patched to name the CPU.
"""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="there is no Megatron-Core: see `make test-integrations`")

import megatron.core
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
from flashmoe.errors import FlashMoEError, InvalidArgument
from flashmoe.integrations import megatron as integration
from flashmoe.integrations.megatron import FlashMoELayer, recognise, with_flashmoe
from flashmoe.launch import RankFailed
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.filterwarnings("ignore")

H, I, E, K = 32, 24, 8, 2
ROUNDING = 32 * 2.0**-24
"""How far a result in float32 may be off, relative to its norm. The result comes from up to six products in turn, of up
to 100 terms each. Each product adds an error of half of 2**-24, times the square root of its number of terms."""


def on_cpu(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(torch.cuda, "current_device", lambda: "cpu")
    if not hasattr(moe_utils, "te_general_gemm"):
        patched.setattr(moe_utils, "te_general_gemm", None, raising=False)  # missing without Transformer Engine
    patched.setattr(CudaRNGStatesTracker, "fork", lambda self, name=None: nullcontext())
    patched.setattr(torch.cuda, "current_stream", lambda: None)
    patched.setattr(megatron_random, "_get_cuda_rng_state", lambda *_, **__: None)
    patched.setattr(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    """Makes this process the only rank of torch.distributed and of Megatron."""
    store = f"file://{tmp_path_factory.mktemp('group')}/rendezvous"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GLOO_SOCKET_IFNAME", "lo")
        on_cpu(patched)
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def on_ranks(on_ranks):
    """As `on_ranks` of conftest.py, in Megatron's group of two ranks that share the experts."""
    return partial(on_ranks, _as_rank)


def _as_rank(rank, fn, *args):
    with pytest.MonkeyPatch.context() as patched:
        on_cpu(patched)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        try:
            return fn(rank, *args)
        finally:
            parallel_state.destroy_model_parallel()


def config(**changes) -> TransformerConfig:
    options = {
        "num_layers": 2,  # the same in all tests: Megatron's first router fixes for how many layers losses are counted
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_moe_experts": E,
        "ffn_hidden_size": I,
        "moe_ffn_hidden_size": I,
        "moe_router_topk": K,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
        "moe_router_load_balancing_type": "none",
        "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.3),
        "output_layer_init_method": lambda weight: torch.nn.init.normal_(weight, std=0.3),
    }
    return TransformerConfig(**options | changes)


def spec(**options):
    return get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False, **options)


def theirs(of: TransformerConfig) -> MoELayer:
    layer = spec()(config=of)
    layer.set_layer_number(1)
    if of.add_bias_linear:  # Megatron adds the bias in place; without a reduction over ranks, to a view
        for expert in layer.experts.local_experts:
            expert.linear_fc2.register_forward_hook(lambda module, given, result: (result[0].clone(), result[1]))
    return layer


def ours(of: TransformerConfig, max_tokens=None, **changes) -> FlashMoELayer:
    """`changes`: fields set in a copy of `of`, because its class refuses them without Transformer Engine or a GPU."""
    of = copy.copy(of)
    for name, value in changes.items():
        setattr(of, name, value)
    layer = with_flashmoe(spec(), max_tokens=max_tokens)(config=of)
    layer.set_layer_number(1)
    return layer


def experts_of(layer: MoELayer, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The weights of Megatron's experts, or their gradients, by the names that `FlashMoELayer` gives them."""
    found = {}
    for part, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            each = [getattr(getattr(expert, part), kind) for expert in layer.experts.local_experts]
            if each[0] is not None:
                values = [torch.zeros_like(one) if one.grad is None else one.grad for one in each]
                found[name + ending] = torch.stack(values if gradients else each).detach()
    return found


def others_of(layer: MoELayer) -> dict[str, torch.Tensor]:
    return {name: each for name, each in layer.named_parameters() if not name.startswith("experts.")}


def pair(of: TransformerConfig, **changes) -> tuple[MoELayer, FlashMoELayer]:
    """Megatron's layer, and a `FlashMoELayer` with the same weights."""
    torch.manual_seed(0)
    layers = theirs(of), ours(of, **changes)
    state = {name: each for name, each in layers[0].state_dict().items() if not name.startswith("experts.")}
    if of.add_bias_linear:
        with torch.no_grad():
            for expert in layers[0].experts.local_experts:
                for part in (expert.linear_fc1, expert.linear_fc2):
                    part.bias.normal_(std=0.3)
    layers[1].load_state_dict(state | {f"experts.{name}": each for name, each in experts_of(layers[0]).items()})
    return layers


def results(layer: MoELayer, x: torch.Tensor, grad: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y, bias = layer(x, **options)
    assert bias is None
    y.backward(grad)
    found = {name: each.grad for name, each in others_of(layer).items()} | {"y": y.detach(), "x": x.grad}
    if isinstance(layer, FlashMoELayer):
        return found | {name: each.grad for name, each in layer.experts.named_parameters()}
    return found | experts_of(layer, gradients=True)


def assert_alike(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rounding: float = ROUNDING) -> None:
    assert got.keys() == expected.keys()
    for name, each in expected.items():
        assert each.norm() > 0, name
        off = float((got[name] - each).norm() / each.norm())
        assert off < rounding, f"{name} is off by {off}"


def batch(seed=1, length=11, sequences=3):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(length, sequences, H, generator=generator) for _ in range(2))


SIGMOID = {"moe_router_score_function": "sigmoid"}
CASES = {
    "swiglu": {},
    "geglu": {"activation_func": F.gelu},
    "quick_gelu": {"activation_func": quick_gelu},
    "clamped": {"activation_func": quick_gelu, "activation_func_clamp_value": 0.7, "glu_linear_offset": 1.0},
    "offset": {"glu_linear_offset": 0.5},
    "silu": {"gated_linear_unit": False},
    "gelu": {"gated_linear_unit": False, "activation_func": F.gelu},
    "relu": {"gated_linear_unit": False, "activation_func": F.relu},
    "squared_relu": {"gated_linear_unit": False, "activation_func": squared_relu},
    "biases": {"add_bias_linear": True},
    "one expert a token": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "weights on the input": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    "sigmoid": {**SIGMOID, "moe_router_topk_scaling_factor": 2.5},
    "bias of the choice": {**SIGMOID, "moe_router_enable_expert_bias": True},
    "groups": {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "float64 router": {"moe_router_dtype": "fp64"},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.1,
    },
    "shared": {"moe_shared_expert_intermediate_size": 40},
    "gated shared": {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
    "drop by probability": {"moe_expert_capacity_factor": 0.8},
    "drop by position": {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_megatrons_layer(case):
    layers = pair(config(**CASES[case]))
    for layer in layers:
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, E))
    x, grad = batch()
    expected, got = (results(layer, x, grad) for layer in layers)
    assert_alike(got, expected)
    if layers[0].router.expert_bias is not None:
        assert torch.equal(*(layer.router.local_tokens_per_expert for layer in layers))
    if case.startswith("drop"):
        _, routing_map = layers[1].router(x)
        assert int(routing_map.sum()) < x[..., 0].numel() * K


def test_padding_counts_for_the_losses_alone():
    layers = pair(config(**CASES["losses"]))
    x, grad = batch()
    mask = torch.zeros(3, 11, dtype=torch.bool)
    mask[:, 8:] = True
    expected, got = (results(layer, x, grad, padding_mask=mask) for layer in layers)
    assert_alike(got, expected)
    assert not torch.equal(got["x"], results(layers[1], x, grad)["x"])


@pytest.mark.parametrize("parts", [["moe"], ["shared_experts"]])
def test_what_is_computed_again_has_the_same_bits(parts):
    once = pair(config(**CASES["shared"]))[1]
    again = pair(config(**CASES["shared"], recompute_granularity="selective", recompute_modules=parts))[1]
    x, grad = batch()
    calls = []
    again.experts.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    expected, got = (results(layer, x, grad) for layer in (once, again))
    assert all(torch.equal(got[name], each) for name, each in expected.items())
    assert calls == ([False, True] if parts == ["moe"] else [True])


def test_bfloat16():
    """Each of the two layers rounds what lies between its products to 8 bits, so the bound is wider."""
    layers = pair(config(params_dtype=torch.bfloat16, bf16=True))
    x, grad = (each.bfloat16() for each in batch())
    expected, got = (results(layer, x, grad) for layer in layers)
    assert got["y"].dtype == got["gate_up_proj"].dtype == torch.bfloat16
    assert_alike(got, expected, rounding=2.0**-6)


def test_choices_ascend_and_dropped_ones_weigh_nothing():
    routing_map = torch.zeros(2, E, dtype=torch.bool)
    routing_map[0, [6, 1]] = routing_map[1, 5] = True
    probs = torch.rand(2, E) * routing_map
    from flashmoe.integrations.megatron.layer import chosen

    ids, weights = chosen(probs, routing_map, K)
    assert ids[0].tolist() == [1, 6] and 5 in ids[1] and len(set(ids[1].tolist())) == 2
    assert torch.equal(weights, probs.gather(1, ids)) and int((weights[1] == 0).sum()) == 1


# A model


def model_of(of, layers):
    torch.manual_seed(0)
    return GPTModel(of, layers, vocab_size=64, max_sequence_length=16, position_embedding_type="rope")


def test_a_gpt_model():
    of = config(hidden_dropout=0.0, attention_dropout=0.0, **CASES["losses"])
    layers = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    whole, model = model_of(of, layers), model_of(of, with_flashmoe(layers))
    state = {name: each for name, each in whole.state_dict().items() if ".experts." not in name}
    for number, layer in enumerate(whole.decoder.layers):
        assert isinstance(model.decoder.layers[number].mlp, FlashMoELayer)
        assert model.decoder.layers[number].is_moe_layer
        state |= {f"decoder.layers.{number}.mlp.experts.{name}": each for name, each in experts_of(layer.mlp).items()}
    model.load_state_dict(state)
    tokens = torch.randint(64, (2, 16))
    positions = torch.arange(16).expand(2, 16)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    gradients = []
    for each in (whole, model):
        loss = each(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        found = {name: one.grad for name, one in each.named_parameters() if ".experts." not in name}
        gradients.append(found | {"loss": loss.detach()})
    assert_alike(gradients[1], gradients[0], rounding=4 * ROUNDING)


# Gradients that Megatron adds up


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
def test_main_grad_of_megatrons_data_parallelism(fusion, overlap):
    """The sum over two microbatches has the same bits if the operator adds it up (`fusion`) and if Megatron does."""
    of = config()
    expected = {}
    plain = pair(of)[1]
    batches = [tuple(batch(seed)) for seed in (1, 2)]
    for x, grad in batches:
        for name, each in results(plain, x, grad).items():
            if name not in ("x", "y"):
                expected[name] = expected.get(name, 0) + each.clone()
        plain.zero_grad()
    layer = pair(of, gradient_accumulation_fusion=fusion)[1]
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    wrapped = DistributedDataParallel(layer.config, how, layer)
    for number, (x, grad) in enumerate(batches):
        if number == 0:
            with wrapped.no_sync():
                wrapped(x)[0].backward(grad)
        else:
            wrapped(x)[0].backward(grad)
    wrapped.finish_grad_sync()
    for name, each in {**dict(layer.experts.named_parameters()), **others_of(layer)}.items():
        assert each.grad is None
        assert torch.equal(each.main_grad, expected[name]), name
    assert layer.experts.down_proj.grad_added_to_main_grad == fusion


# Expert parallelism


def _train(rank, options, state, tokens):
    """One rank's results and initial experts. The gradients of its experts are of the sum of all ranks' losses."""
    torch.manual_seed(7)
    layer = ours(config(**options, expert_model_parallel_size=2), max_tokens=64)
    drawn = {name: each.detach().clone() for name, each in layer.experts.named_parameters()}
    assert not any(each.allreduce for each in layer.experts.parameters())
    layer.load_state_dict(state)  # `state` has all experts, and the layer takes this rank's
    found = results(layer, *batch(10 + rank, *tokens[rank]))
    with torch.no_grad():
        again = layer(next(iter(batch(10 + rank, *tokens[rank]))))[0]
    assert torch.equal(again, found["y"])
    return found, drawn


@pytest.mark.parametrize("case", ["swiglu", "biases", "bias of the choice", "gated shared", "drop by probability"])
@pytest.mark.parametrize("tokens", [((11, 3), (11, 3)), ((5, 1), (21, 2)), ((4, 2), (1, 1))])
def test_two_ranks_are_as_one(on_ranks, case, tokens):
    options = CASES[case]
    whole, alone = pair(config(**options))
    by_rank = on_ranks(_train, options, alone.state_dict(), tokens)
    sums = {}
    for rank, (found, _) in enumerate(by_rank):
        x, grad = batch(10 + rank, *tokens[rank])
        expected, of_one = results(whole, x, grad), results(alone, x, grad)
        if not case.endswith("shared"):  # the shared expert's bits depend on PyTorch's number of threads
            assert torch.equal(found["y"], of_one["y"])
        assert_alike({"y": found["y"], "x": found["x"]}, {"y": expected["y"], "x": expected["x"]})
        own = others_of(whole)
        assert_alike({name: found[name] for name in own}, {name: expected[name] for name in own})
        for name, each in expected.items():
            if name in dict(alone.experts.named_parameters()):
                sums[name] = sums.get(name, 0) + each.clone()
        whole.zero_grad()
        alone.zero_grad()
    assert_alike({name: torch.cat([found[name] for found, _ in by_rank]) for name in sums}, sums)


def test_initial_weights_do_not_depend_on_the_number_of_ranks(on_ranks):
    torch.manual_seed(7)
    alone = ours(config())
    drawn = [each for _, each in on_ranks(_train, {}, alone.state_dict(), ((3, 1), (3, 1)))]
    for name, each in alone.experts.named_parameters():
        assert torch.equal(torch.cat([of_rank[name] for of_rank in drawn]), each.detach())
    assert float(alone.experts.down_proj.detach().std()) == pytest.approx(0.3, rel=0.1)
    assert all(each.allreduce for each in alone.experts.parameters())


def _call_with_more_tokens_than_said(rank):
    layer = ours(config(expert_model_parallel_size=2), max_tokens=16)
    layer(torch.randn(17, 1, H))


def test_more_tokens_than_said(on_ranks):
    with pytest.raises(RankFailed, match="x: expected at most max_tokens=16 tokens, the context's limit, got T=17"):
        on_ranks(_call_with_more_tokens_than_said)


def _make_without_max_tokens(rank):
    ours(config(expert_model_parallel_size=2))


def test_several_ranks_must_say_how_many_tokens(on_ranks):
    with pytest.raises(RankFailed, match="max_tokens: expected the most tokens S B of a rank in a call"):
        on_ranks(_make_without_max_tokens)


# Checkpoints


def stored(*states) -> dict[str, torch.Tensor]:
    """The tensors of all experts, by key, that a distributed checkpoint has of the ranks' sharded states."""
    found = {}
    for state in states:
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor):
                whole = found.setdefault(part.key, torch.full(part.global_shape, torch.nan))
                whole[part.global_slice()] = part.data.detach()
    assert not any(each.isnan().any() for each in found.values())
    return found


@pytest.mark.parametrize("case", ["swiglu", "biases", "relu", "gated shared"])
def test_distributed_checkpoints_are_those_of_megatrons_layer(case):
    """Keys, shapes and values are equal. The offsets add a first axis, of layers, as in a model's checkpoint."""
    offsets = ((0, 0, 1),)
    expected, got = (
        stored(layer.sharded_state_dict(prefix="mlp.", sharded_offsets=offsets))
        for layer in pair(config(**CASES[case]))
    )
    assert expected.keys() == got.keys()
    for name, each in expected.items():
        assert torch.equal(got[name], each), name


def _sharded(rank, state):
    layer = ours(config(expert_model_parallel_size=2), max_tokens=64)
    layer.load_state_dict(state)
    state = layer.sharded_state_dict(prefix="mlp.")
    return stored_parts(state)


def stored_parts(state):
    return [
        (part.key, part.global_shape, part.global_slice(), part.replica_id, part.data.detach())
        for part in nested_values(state)
        if isinstance(part, ShardedTensor)
    ]


def test_two_ranks_save_what_one_does(on_ranks):
    whole, alone = pair(config())
    expected = stored(whole.sharded_state_dict(prefix="mlp."))
    found = {}
    for rank, parts in enumerate(on_ranks(_sharded, alone.state_dict())):
        for key, shape, place, replica, data in parts:
            if ".experts." in key:
                assert replica == (0, 0, 0)
            elif rank > 0:
                assert replica != (0, 0, 0)
            found.setdefault(key, torch.full(shape, torch.nan))[place] = data
    assert expected.keys() == found.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


# What is refused

REFUSED = {
    "fp8": "hybrid",
    "fp4": "e2m1",
    "moe_latent_size": 16,
    "moe_mlp_glu_interleave_size": 32,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_padding_for_quantization": True,
    "moe_shared_expert_overlap": True,
    "overlap_moe_expert_parallel_comm": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "delay_wgrad_compute": True,
    "use_te_activation_func": True,
    "cuda_graph_impl": "local",
    "expert_tensor_parallel_size": 2,
}


def test_every_flag_is_tried():
    assert REFUSED.keys() == recognise.FLAGS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operator_does_not_compute_is_refused(name):
    expected = rf"^{name}: expected .*{recognise.FLAGS[name]}.*, got .*{REFUSED[name]}"
    with pytest.raises(InvalidArgument, match=expected):
        ours(config(), **{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transformer_impl": "inference_optimized"}, "transformer_impl: expected one that trains"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm", "moe_act"]},
            "offload_modules: expected none of expert_fc1, moe_act, got moe_act",
        ),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input: expected False unless moe_router_topk is 1"),
        ({"activation_func": torch.tanh}, "activation_func: expected one of silu, gelu, quick_gelu with gated"),
        ({"activation_func": squared_relu}, "activation_func: expected .*got squared_relu"),
        ({"activation_func": quick_gelu, "gated_linear_unit": False}, "activation_func: expected .*got quick_gelu"),
        ({"activation_func": F.gelu, "glu_linear_offset": 1.0}, "glu_linear_offset: expected None and 0"),
        ({"params_dtype": torch.float64}, "params_dtype: expected one of float32"),
    ],
)
def test_what_else_is_refused(changes, said):
    with pytest.raises(InvalidArgument, match=said):
        ours(config(), **changes)


def test_experts_cut_by_tensor_parallelism_are_refused():
    groups = copy.copy(moe_utils.get_default_pg_collection())
    groups.expt_tp = SimpleNamespace(size=lambda: 2)
    with pytest.raises(InvalidArgument, match="expert_tensor_parallel_size: expected 1, got 2"):
        with_flashmoe(spec(), pg_collection=groups)(config=config())


def test_calls_that_are_refused():
    layer = ours(config())
    x = torch.randn(3, 2, H)
    with pytest.raises(InvalidArgument, match="intermediate_tensors: expected None, got tuple"):
        layer(x, (x, x))
    layer.config.moe_pad_expert_input_to_capacity = True  # as Megatron's text generation does
    with pytest.raises(InvalidArgument, match="moe_pad_expert_input_to_capacity: expected False, got True"):
        layer(x)
    layer.config.moe_pad_expert_input_to_capacity = False
    layer.attn_tp_group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(InvalidArgument, match="sequence_parallel: expected True"):
        layer(x)
    assert layer.eval()(x)[0].shape == x.shape


def test_buffers_that_are_not_float32_are_refused():
    layer = ours(config(), gradient_accumulation_fusion=True)
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.bfloat16)
    with pytest.raises(FlashMoEError, match=r"main_grad: expected .* float32"):
        layer(torch.randn(3, 2, H))


def test_experts_as_tensors_of_their_own_are_refused():
    with pytest.raises(InvalidArgument, match="singleton_local_shards: expected False"):
        ours(config()).experts.sharded_state_dict(metadata={"singleton_local_shards": True})


def test_a_specification_without_experts_is_refused():
    with pytest.raises(InvalidArgument, match="spec: expected one with a MoELayer in it, got ModuleSpec without"):
        with_flashmoe(get_gpt_layer_local_spec())


def test_a_specification_is_not_changed():
    given = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    before = repr(given)
    with_flashmoe(given, max_tokens=3)
    assert repr(given) == before


def test_another_release_is_left_as_it_is(monkeypatch):
    spec = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
    left = r"expected Megatron\.Core 0\.16 to 0\.19, got 7\.0\.0, .* leaves Megatron\.Core as it is"
    with monkeypatch.context() as patch:
        patch.setattr(megatron.core, "__version__", "7.0.0")
        with pytest.warns(UserWarning, match=left):
            importlib.reload(integration)
        assert integration.with_flashmoe(spec, max_tokens=64) is spec
        patch.setenv("FLASHMOE_UNTRIED", "1")
        importlib.reload(integration)
        assert integration.with_flashmoe(spec, max_tokens=64) is not spec
    importlib.reload(integration)
