"""Routed experts of torchtitan with the operator in them, on CPUs, against PyTorch in float64. (torchtitan computes its
own experts in bfloat16, whatever the type of their weights.)"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("triton", reason="there is no triton, which torchtitan imports: see `make test-integrations`")
spmd = pytest.importorskip("spmd_types", reason="there is no torchtitan: see `make test-integrations`")
torchtitan = pytest.importorskip("torchtitan", reason="there is no torchtitan: see `make test-integrations`")

from flashmoe.errors import InvalidArgument  # noqa: E402
from flashmoe.integrations import torchtitan as integration  # noqa: E402
from flashmoe.integrations.torchtitan import FlashMoEExperts, FlashMoERoutedExperts, flashmoe_experts  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torchtitan.config import OverrideConfig, clear_overrides  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402
from torchtitan.distributed import parallel_dims  # noqa: E402
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchtitan.models.common.config_utils import make_routed_experts_config  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.common.moe_sharding import set_moe_sharding_config  # noqa: E402

D, HIDDEN, E, K = 32, 24, 8, 3
ROUNDING = 32 * 2.0**-24
"""How far a result in float32 may be off, relative to its norm. The result comes from up to six products in turn, of up
to 100 terms each. Each product adds an error of half of 2**-24, times the square root of its number of terms."""
NORMAL = {name: lambda weight: torch.nn.init.normal_(weight, std=0.3) for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
NAMES = ("inner_experts.w1_EFD", "inner_experts.w2_EDF", "inner_experts.w3_EFD")


def config():
    sizes = {"dim": D, "hidden_dim": HIDDEN, "num_experts": E, "top_k": K}
    return make_routed_experts_config(**sizes, param_init=NORMAL, comm_backend="standard")


def layer_of(dtype=torch.float32, seed=0) -> FlashMoERoutedExperts:
    torch.manual_seed(seed)
    layer = flashmoe_experts(config()).build()
    layer.init_states()
    return layer.to(dtype)


def routed(seed=1, tokens=(3, 11), dtype=torch.float32):
    """x, the scores and ids of the choices, the number of choices of each expert, and the gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(*tokens, D, generator=generator).to(dtype) for _ in range(2))
    scores, ids = torch.rand(*tokens, E, generator=generator).topk(K)
    return x, scores, ids, torch.bincount(ids.flatten(), minlength=E), grad


def expected(weights, x, scores, ids):
    """The layer's result, computed by PyTorch in the tensors' type, expert by expert."""
    w1, w2, w3 = weights
    out = torch.zeros_like(x)
    for expert in range(E):
        y = (F.silu(x @ w1[expert].T) * (x @ w3[expert].T)) @ w2[expert].T
        out = out + y * (scores * (ids == expert)).sum(-1, keepdim=True)
    return out


def results_of_reference(layer, x, scores, ids, count, grad):
    given = (*map(layer.get_parameter, NAMES), x, scores)
    leaves = [each.detach().double().requires_grad_() for each in given]
    y = expected(leaves[:3], leaves[3], leaves[4], ids)
    y.backward(grad.double())
    return dict(zip((*NAMES, "x", "scores"), (each.grad for each in leaves), strict=True)) | {"y": y.detach()}


def results(layer, x, scores, ids, count, grad, through=None):
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    y = through(x, scores, ids, count) if through else layer(x, scores, ids, count)
    y.backward(grad)
    found = {name: layer.get_parameter(name).grad for name in NAMES}
    return found | {"x": x.grad, "scores": scores.grad, "y": y.detach()}


def assert_alike(got, wanted, rounding=ROUNDING):
    assert got.keys() == wanted.keys()
    for name, each in wanted.items():
        off = float((got[name] - each).norm() / each.norm())
        assert off < rounding, f"{name} is off by {off}"


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, ROUNDING), (torch.bfloat16, 2.0**-6)])
def test_outputs_and_gradients(dtype, rounding):
    layer, inputs = layer_of(dtype), routed(dtype=dtype)
    got = results(layer, *inputs)
    assert got["y"].dtype == got["inner_experts.w1_EFD"].dtype == dtype
    assert_alike(got, results_of_reference(layer, *inputs), rounding)
    with torch.no_grad():
        assert torch.equal(layer(*inputs[:4]), got["y"])


def test_weights_of_another_type_are_used_in_that_of_x():
    """The weights are in float32, as without mixed precision, and x is in bfloat16."""
    layer, inputs = layer_of(), routed(dtype=torch.bfloat16)
    got = results(layer, *inputs)
    assert got["inner_experts.w1_EFD"].dtype == torch.float32
    assert_alike(got, results_of_reference(layer, *inputs), 2.0**-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_a_linear_layer_does(dtype, of_x):
    """x is in 16 bits, as from a layer that autocast casts, or in float32, as from a layer that it does not cast."""
    x, scores, ids, count, grad = routed(dtype=of_x)
    inputs, within = (x, scores, ids, count, grad.to(dtype)), torch.autocast("cpu", dtype)

    def in_autocast(layer):
        def through(*given):
            with within:
                return layer(*given)

        return through

    layer, by_hand = layer_of(), layer_of()
    got = results(layer, *inputs, through=in_autocast(layer))
    wanted = results(by_hand, *inputs, through=lambda x, *rest: by_hand(x.to(dtype), *rest))
    again = layer_of()
    recomputed = results(
        again, *inputs, through=in_autocast(lambda *given: checkpoint(again, *given, use_reentrant=False))
    )
    assert got["y"].dtype == dtype and got["x"].dtype == of_x and got["inner_experts.w1_EFD"].dtype == torch.float32
    for name, each in wanted.items():
        assert torch.equal(got[name], each) and torch.equal(recomputed[name], each), name
    with torch.no_grad(), within:
        assert torch.equal(layer(*inputs[:4]), got["y"])
        assert F.linear(inputs[0], layer.inner_experts.w1_EFD[0]).dtype == dtype


@pytest.mark.parametrize("frozen", [NAMES, NAMES[:1], NAMES[1:2]])
def test_frozen_weights(frozen):
    layer, inputs = layer_of(), routed()
    wanted = results(layer_of(), *inputs)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    for name, each in results(layer, *inputs).items():
        assert each is None if name in frozen else torch.equal(each, wanted[name]), name


def test_the_merged_copy_is_not_kept():
    layer = layer_of()
    x, scores, ids, count, _ = routed()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.shape) or each, lambda each: each):
        layer(x.requires_grad_(), scores, ids, count)
    assert (E, HIDDEN, D) in saved and (E, 2 * HIDDEN, D) not in saved


def test_what_is_computed_again_has_the_same_bits():
    inputs = routed()
    layer = layer_of()
    again = results(layer, *inputs, through=lambda *each: checkpoint(layer, *each, use_reentrant=False))
    for name, each in results(layer_of(), *inputs).items():
        assert torch.equal(again[name], each), name


# In torchtitan


def moe_config():
    gate = Linear.Config(in_features=D, out_features=E, bias=False, param_init={"weight": torch.nn.init.normal_})
    router = TokenChoiceTopKRouter.Config(num_experts=E, top_k=K, gate=gate, route_norm=True)
    return MoE.Config(num_experts=E, routed_experts=config(), router=router)


def test_the_override_keeps_names_and_initial_weights():
    root = moe_config()
    theirs = copy.deepcopy(root).build()
    said = apply_overrides(OverrideConfig(imports=["flashmoe.integrations.torchtitan.flashmoe_experts"]), root)
    assert len(said) == 1 and "FlashMoERoutedExperts" in said[0]
    ours = root.build()
    assert isinstance(ours.routed_experts.inner_experts, FlashMoEExperts)
    for each in (theirs, ours):
        torch.manual_seed(0)
        each.init_states()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, each in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], each), name
    x = torch.randn(2, 9, D)
    y = ours(x)
    scores, ids, _ = ours.router(x, ours.expert_bias_E)
    weights = [ours.routed_experts.get_parameter(name) for name in NAMES]
    assert_alike({"y": y}, {"y": expected(weights, x, scores, ids)})


# Ranks


def _two_ranks(rank, state, wrap):
    """One rank's results with experts spread over a mesh ``ep``, as torchtitan spreads them. `wrap`: with FSDP2."""
    meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    layer = layer_of(seed=5)
    layer.load_state_dict(state)
    layer._sharding_config = layer.inner_experts._sharding_config = None
    inner = layer.inner_experts
    for name, each in list(inner.named_parameters()):
        setattr(inner, name, torch.nn.Parameter(distribute_tensor(each.detach(), meshes["ep"], [Shard(0)])))
    layer.parallelize(SimpleNamespace(get_optional_mesh=lambda name: meshes[name], tp_enabled=False, tp=1))
    if wrap:
        fully_shard(inner, mesh=meshes["efsdp"])
    inputs = routed(10 + rank)
    found = results(layer, *inputs)
    assert isinstance(inner.w1_EFD, DTensor)
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in found.items()}


@pytest.mark.parametrize("wrap", [False, True], ids=["", "FSDP2"])
def test_two_ranks_are_as_one(on_ranks, wrap):
    alone = layer_of()
    by_rank = on_ranks(_two_ranks, alone.state_dict(), wrap)
    sums = dict.fromkeys(NAMES, 0)
    for rank, found in enumerate(by_rank):
        inputs = routed(10 + rank)
        wanted = results_of_reference(alone, *inputs)
        assert_alike({name: found[name] for name in ("x", "scores", "y")}, {n: wanted[n] for n in ("x", "scores", "y")})
        assert torch.equal(found["y"], results(layer_of(), *inputs)["y"])
        sums = {name: sums[name] + wanted[name] for name in NAMES}
    assert_alike({name: torch.cat([found[name] for found in by_rank]) for name in NAMES}, sums)


def _in_torchtitan(rank, state, backend):
    """One rank's results after torchtitan's own `parallelize`: the two ranks of data parallelism share the experts."""
    sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 2, "world_size": 2}
    dims = ParallelDims(**sizes, spmd_backend=backend)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parallel_dims, "device_type", "cpu")  # torchtitan does not choose "cpu", even without a GPU
        dims.build_mesh()
    root = moe_config()
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(root, enable_ep=True, enable_sp=False, expert_param_layout=layout)
    apply_overrides(OverrideConfig(imports=["flashmoe.integrations.torchtitan.flashmoe_experts"]), root)
    layer = root.build()
    layer.init_states()
    layer.load_state_dict(state)
    layer.parallelize(dims)
    x, *_, grad = routed(10 + rank)
    y = layer(x.requires_grad_())
    y.backward(grad)
    found = {name: layer.routed_experts.get_parameter(name).grad for name in NAMES} | {"x": x.grad, "y": y.detach()}
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in found.items()}


@pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
def test_torchtitans_own_expert_parallelism(on_ranks, backend):
    root = moe_config()
    apply_overrides(OverrideConfig(imports=["flashmoe.integrations.torchtitan.flashmoe_experts"]), root)
    alone = root.build()
    torch.manual_seed(0)
    alone.init_states()
    by_rank = on_ranks(_in_torchtitan, alone.state_dict(), backend)
    for rank, found in enumerate(by_rank):
        x, *_, grad = routed(10 + rank)
        y = alone(x.requires_grad_())
        y.backward(grad)  # the experts' gradients add up over the ranks
        assert torch.equal(found["y"], y)
        assert_alike({"x": found["x"]}, {"x": x.grad})
    sums = {name: alone.routed_experts.get_parameter(name).grad for name in NAMES}
    assert_alike({name: torch.cat([found[name] for found in by_rank]) for name in NAMES}, sums)


def _fsdp(rank, state):
    """One rank's results with all experts, sharded by FSDP2: their gradients are the mean over the ranks' inputs."""
    layer = layer_of(seed=5)
    layer.load_state_dict(state)
    fully_shard(layer.inner_experts, mesh=init_device_mesh("cpu", (2,)))
    found = results(layer, *routed(10 + rank))
    dist.barrier()
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def test_fsdp2_without_expert_parallelism(on_ranks):
    alone = layer_of()
    wanted = [results_of_reference(alone, *routed(10 + rank)) for rank in range(2)]
    for rank, found in enumerate(on_ranks(_fsdp, alone.state_dict())):
        mean = {name: sum(each[name] for each in wanted) / 2 for name in NAMES}
        assert_alike(found, wanted[rank] | mean)


# What is refused


def test_other_experts_are_refused():
    class Others(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    changed = config()
    changed.inner_experts = Others.Config(dim=D, hidden_dim=HIDDEN, num_experts=E)
    with pytest.raises(InvalidArgument, match=r"inner_experts: expected GroupedExperts.Config, got .*Others.Config"):
        flashmoe_experts(changed)
    with pytest.raises(InvalidArgument, match=r"routed_experts: expected RoutedExperts.Config, got .*FlashMoERouted"):
        flashmoe_experts(flashmoe_experts(config()))
    converted = flashmoe_experts(config())
    converted.inner_experts = changed.inner_experts  # as a converter does that runs after the override
    with pytest.raises(InvalidArgument, match=r"inner_experts: expected FlashMoEExperts.Config, got .*Others.Config"):
        converted.build()


def test_tensor_parallel_experts_are_refused():
    layer = layer_of()
    layer._sharding_config = layer.inner_experts._sharding_config = None
    with pytest.raises(InvalidArgument, match="tensor_parallel_degree: expected 1 without expert parallelism, got 2"):
        layer.parallelize(SimpleNamespace(get_optional_mesh=lambda name: None, tp_enabled=True, tp=2))


def test_compiled_blocks_are_refused():
    layer = layer_of()
    with pytest.raises(Exception, match=r"leave 'model' out of compile.components"):
        torch.compile(layer, backend="eager", fullgraph=True)(*routed()[:4])


def test_another_release_is_left_as_it_is(monkeypatch):
    override = OverrideConfig(imports=["flashmoe.integrations.torchtitan.flashmoe_experts"])
    with monkeypatch.context() as patch:
        patch.setattr(torchtitan, "__version__", "7.0.0")
        clear_overrides()
        with pytest.warns(UserWarning, match=r"expected torchtitan 0\.3 to 0\.3, got 7\.0\.0, .* leaves torchtitan as"):
            importlib.reload(integration)
        assert apply_overrides(override, moe_config()) == []
        patch.setenv("FLASHMOE_UNTRIED", "1")
        clear_overrides()
        importlib.reload(integration)
        assert len(apply_overrides(override, moe_config())) == 1
    clear_overrides()
    importlib.reload(integration)
