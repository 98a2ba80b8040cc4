"""Transformers' own expert parallelism with FlashMoE in it, against the whole model with eager experts."""

from __future__ import annotations

import flashmoe
import pytest
import torch

transformers = pytest.importorskip("transformers")

from flashmoe.integrations.transformers._release import INSTALLED, WITH_EXPERT_PARALLELISM  # noqa: E402

if INSTALLED < WITH_EXPERT_PARALLELISM:
    pytest.skip(
        f"Transformers {transformers.__version__} has no EPImplementationInterface (5.23 has)", allow_module_level=True
    )

from flashmoe.integrations.transformers.expert_parallel import ExpertParallel  # noqa: E402
from flashmoe.launch import RankFailed  # noqa: E402
from test_transformers import (  # noqa: E402
    ARCHITECTURES,
    PROMPT,
    VOCABULARY,
    assert_same_gradients,
    gradients_of,
    logits_of,
    with_experts,
)
from test_transformers import model_of as some_model_of  # noqa: E402
from test_transformers_parallel import greedy, on_ranks  # noqa: E402, F401
from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: E402
from transformers.distributed.utils import initialize_distributed_mesh  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 12


def test_it_is_registered():
    assert EPImplementationInterface()["flashmoe"] is ExpertParallel


def batch_of(number, length=9):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def model_of(name, **changes):
    """A model whose attention has four heads, so that four ranks can share it."""
    return some_model_of(name, num_attention_heads=4, num_key_value_heads=4, **changes)


def spread(model, layout):
    """The model after Transformers has spread its experts over the ranks, by the method that its loader calls. (The
    loader itself needs the package accelerate.)"""
    _, mesh = initialize_distributed_mesh(layout)
    return type(model).maybe_distribute_model(model, layout, mesh).eval()


def layout_of(ranks, implementation="flashmoe", **layout):
    return DistributedConfig(ep_size=ranks, ep_implementation=implementation, **({"tp_size": ranks} | layout))


def _compare(rank, ranks, layout, name, folder=None):
    """How far a spread model's logits are from those of the whole model with eager experts, whether both write the same
    tokens, and how many experts each module names and holds.

    The unit of the distance is 1e-5, or if that is more, twice the error that float32 leaves in the whole model's
    logits (beside float64): both models may have an error of this size (Qwen3-Next of 5e-4, on some processors)."""
    whole = with_experts(model_of(name), "eager")
    exact = with_experts(model_of(name), "eager").double()
    layout = layout_of(ranks, **layout)
    if folder is None:
        model = spread(model_of(name), layout)
    else:
        model = type(whole).from_pretrained(folder, distributed_config=layout).eval()
    experts = [each for each in model.modules() if hasattr(each, "_apply_gate")]
    group = rank // layout.tp_size  # ranks of a group share a batch
    off = []
    with torch.no_grad():
        # The second batch is so large that the context grows, and it has another length in each group.
        for ids in (batch_of(group), batch_of(group, 90 + 7 * group), torch.tensor(PROMPT)):
            expected = whole(ids).logits
            rounding = float((expected - exact(ids).logits).abs().max())
            off.append(float((model(ids).logits - expected).abs().max()) / max(1e-5, 2 * rounding))
    same = torch.equal(greedy(model, torch.tensor(PROMPT)), greedy(whole, torch.tensor(PROMPT)))
    return off, same, [each.num_experts for each in experts], [each.down_proj.to_local().shape[0] for each in experts]


LAYOUTS = {
    "2 share a batch": (2, {}),
    "4 share a batch": (4, {}),
    "2 batches": (2, {"tp_size": 1, "fsdp_size": 2}),
    "4 batches": (4, {"tp_size": 1, "fsdp_size": 4}),
    "2 batches, each of 2 ranks": (4, {"tp_size": 2, "fsdp_size": 2}),
}
E_OF = {"Mixtral": 4, "DeepseekV3": 8}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_a_spread_model_computes_what_the_whole_one_does(on_ranks, name, layout):  # noqa: F811
    ranks, layout = LAYOUTS[layout]
    for off, same, numbers, held in on_ranks(ranks, _compare, layout, name):
        assert max(off) <= 1 and same
        assert set(numbers) == set(held) == {E_OF[name] // ranks}


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(E_OF)))
def test_every_architecture_on_two_ranks(on_ranks, name):  # noqa: F811
    for off, same, *_ in on_ranks(2, _compare, {}, name):
        assert max(off) <= 1 and same


def test_a_model_that_the_loader_spreads(on_ranks, tmp_path):  # noqa: F811
    pytest.importorskip("accelerate", reason="Transformers' loader spreads models with the package accelerate alone")
    model_of("Qwen3Moe").save_pretrained(tmp_path)
    for off, same, *_ in on_ranks(2, _compare, {}, "Qwen3Moe", str(tmp_path)):
        assert max(off) <= 1 and same


def _say(rank, ranks, name, changes):
    try:
        spread(model_of(name, **changes), layout_of(ranks))
    except (flashmoe.FlashMoEError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("ranks", "name", "changes", "message"),
    [
        (2, "Mixtral", {"hidden_act": "quick_gelu"}, "MixtralExperts.act_fn: expected one of SiLU, "),
        # Transformers itself refuses the last two.
        (4, "Qwen3Moe", {}, "Cannot evenly shard 6 experts across 4"),
        (2, "Llama4", {}, "`ep_size=2` was requested, but `Llama4ForCausalLM` has no `ep_plan`."),
    ],
)
def test_what_is_refused(on_ranks, ranks, name, changes, message):  # noqa: F811
    for said in on_ranks(ranks, _say, name, changes):
        assert said.startswith(message)


def _train(rank, ranks, layout):
    """Compares the gradients of a spread model with those of the whole model."""
    layout = layout_of(ranks, **layout)
    whole = gradients_of(with_experts(model_of("Mixtral"), "eager"), PROMPT)
    model = spread(model_of("Mixtral"), layout)
    found = {
        name: getattr(each, "to_local", lambda each=each: each)() for name, each in gradients_of(model, PROMPT).items()
    }
    for name, each in found.items():
        if len(each) != len(whole[name]):  # the rank has a shard of this parameter, or some of the experts
            whole[name] = whole[name].chunk(ranks)[rank]
    assert_same_gradients(found, whole)


def test_gradients_of_ranks_with_batches_of_their_own(on_ranks):  # noqa: F811
    ranks, layout = LAYOUTS["2 batches"]
    on_ranks(ranks, _train, layout)


def test_there_are_no_gradients_of_tokens_that_ranks_hold_alike(on_ranks):  # noqa: F811
    ranks, layout = LAYOUTS["2 share a batch"]
    with pytest.raises(RankFailed, match=r"NotImplementedError: .*FlashMoE has no backward pass"):
        on_ranks(ranks, _train, layout)


def _with_local_ids(rank, ranks):
    refused = r"ep_implementation=\"flashmoe\"\), got True"
    model = spread(model_of("Mixtral"), layout_of(ranks, "all_reduce"))
    with pytest.raises(flashmoe.InvalidArgument, match=refused):
        with_experts(model, "flashmoe")
    model.config._experts_implementation = "flashmoe"  # as if the model had taken the name before it was spread
    with pytest.raises(flashmoe.InvalidArgument, match=refused):
        logits_of(model, PROMPT)
    with_experts(spread(model_of("Mixtral"), layout_of(ranks)), "flashmoe")
    return True


def test_ids_among_a_rank_s_own_experts_are_refused(on_ranks):  # noqa: F811
    """Other implementations of expert parallelism give experts such ids. FlashMoE's experts, which take ids among all
    experts, refuse to be used with these implementations."""
    assert on_ranks(2, _with_local_ids) == [True] * 2
