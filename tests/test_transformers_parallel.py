"""Models of Transformers whose experts are spread over ranks, against the same models in one process, bit for bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import flashmoe
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from flashmoe.integrations.transformers import load_parallel, parallelize
from flashmoe.integrations.transformers.experts import NAME, experts_modules
from flashmoe.launch import RankFailed
from gloo import Gloo
from problems import PATIENCE
from safetensors.torch import load_file, save_file
from test_transformers import VOCABULARY, model_of, with_experts

ROOM = {"max_tokens": 200, "timeout": PATIENCE}
LOAD = {"max_tokens": 200, "context_options": {"timeout": PATIENCE}}


@pytest.fixture
def on_ranks(pool, tmp_path):
    """A function that calls ``fn(rank, ranks, *args)`` in so many processes, which are ranks of torch.distributed, and
    returns their results by rank."""
    return lambda ranks, fn, *args: Gloo(pool, tmp_path)(ranks, fn, ranks, *args)


def batch_of(rank, seed=0):
    """A random batch of token ids, of another size on every rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(VOCABULARY, (1 + rank % 2, 7 + 5 * rank), generator=generator)


def greedy(model, ids, **options):
    return model.generate(ids, do_sample=False, max_new_tokens=12, min_new_tokens=12, **options)


def bits_of(tensor):
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def results_of(model, rank, **options):
    """The model's logits for the rank's batches, and its greedy tokens for the first of them, as bytes."""
    with torch.no_grad():
        logits = [bits_of(model(batch_of(rank, seed)).logits) for seed in range(3)]
    return [*logits, bits_of(greedy(model, batch_of(rank), **options))]


def _compare(rank, ranks, name, dtype, **options):
    """Whether the model gives the same bits before and after it is spread, and again after the eager implementation is
    chosen; the memory of each module per expert of the rank, as a part of the whole; the return mode."""
    model = with_experts(model_of(name, dtype), NAME)
    expected = results_of(model, rank)
    whole = [module.down_proj.untyped_storage().nbytes() for module in experts_modules(model)]
    context = parallelize(model, **ROOM, **options)
    got = results_of(model, rank, synced_gpus=True)
    with_experts(model, "eager")  # has no effect on experts that are spread
    again = results_of(model, rank, synced_gpus=True)
    left = [module.down_proj.untyped_storage().nbytes() for module in experts_modules(model)]
    shares = [mine / all_ / len(context.local_experts()) for mine, all_ in zip(left, whole, strict=True)]
    return got == expected, again == expected, shares, context.last_call.return_mode


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "dtype"), [("Mixtral", torch.float32), ("Qwen3Moe", torch.bfloat16), ("DeepseekV3", torch.float32)]
)
def test_a_model_that_is_spread_gives_the_same_bits(on_ranks, ranks, name, dtype):
    experts = experts_modules(model_of(name))[0].num_experts
    for same, again, shares, mode in on_ranks(ranks, _compare, name, dtype):
        assert same and again and mode == "direct"
        assert shares == [pytest.approx(1 / experts)] * len(shares)


def _compare_with_copies(rank, ranks, placement):
    return _compare(rank, ranks, "Mixtral", torch.bfloat16, placement=placement)


def test_a_model_whose_experts_have_copies_gives_the_same_bits(on_ranks):
    for same, again, shares, mode in on_ranks(4, _compare_with_copies, [[3, 0], 1, [2, 0, 1], 3]):
        assert same and again and mode == "direct"
        assert shares == [pytest.approx(1 / 4)] * len(shares)


# Loading


def _load(rank, ranks, folders, options, placement=None):
    """Whether a model that each rank loads in part, from the rank's own folder, gives the bits of the whole model."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(folders[-1], experts_implementation=NAME, **options)
    expected = results_of(whole.eval(), rank)
    load = {**LOAD, "context_options": LOAD["context_options"] | {"placement": placement}}
    model = load_parallel(folders[rank], **load, **options)
    assert type(model) is type(whole) and not model.training
    elements = sum(module.gate_up_proj.numel() for module in experts_modules(model))
    assert elements < sum(module.gate_up_proj.numel() for module in experts_modules(whole)) or ranks == 1
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    return results_of(model, rank, synced_gpus=True) == expected


def without_the_experts_of_others(folder, copy, experts, rank, ranks):
    """Copies the checkpoint into files of one tensor each, and leaves out other ranks' experts. Returns how many
    tensors are left out."""
    share = range(rank * experts // ranks, (rank + 1) * experts // ranks)
    index = {}
    copy.mkdir()
    for name, tensor in load_file(folder / "model.safetensors").items():
        index[name] = f"{len(index)}.safetensors"
        expert = [int(part) for part in name.split(".experts.")[-1].split(".")[:1] if ".experts." in name]
        if all(each in share for each in expert):
            save_file({name: tensor}, copy / index[name])
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("config.json", "generation_config.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    return len(index) - len(list(copy.glob("*.safetensors")))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Glm4Moe", "Phimoe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_opens_no_file_of_others_experts(on_ranks, tmp_path, ranks, name):
    model = model_of(name)
    model.save_pretrained(tmp_path / "whole")
    experts = experts_modules(model)[0].num_experts
    folders = [tmp_path / f"rank-{rank}" for rank in range(ranks)]
    for rank, folder in enumerate(folders):
        missing = without_the_experts_of_others(tmp_path / "whole", folder, experts, rank, ranks)
        assert missing == 3 * len(experts_modules(model)) * experts * (ranks - 1) // ranks
    options = {"dtype": torch.float32}
    assert on_ranks(ranks, _load, [*map(str, folders), str(tmp_path / "whole")], options) == [True] * ranks


def test_of_tensors_of_all_experts_a_rank_reads_its_rows(on_ranks, tmp_path):
    """The checkpoint's tensors have all experts of a layer, as in the memory of Transformers."""
    model = model_of("Qwen3Moe", torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, tmp_path / "model.safetensors")
    for placement in (None, [[0, 1], 1, 0, 1, [1, 0], 0]):  # the second has copies, and a rank's rows lie apart
        assert on_ranks(2, _load, [str(tmp_path)] * 3, {"dtype": torch.bfloat16}, placement) == [True] * 2


def _load_shipped(rank, ranks, placement):
    with resources.as_file(resources.files("flashmoe") / "assets" / "tiny-qwen3-moe") as folder:
        return _load(rank, ranks, [str(folder)] * (ranks + 1), {}, placement)


@pytest.mark.parametrize("placement", [None, [0, [1, 0], 1, 0] * 4], ids=["contiguous", "copies"])
def test_the_shipped_model_on_two_ranks(on_ranks, placement):
    """The shipped model has tied embeddings, and is loaded in the type that its configuration names."""
    assert on_ranks(2, _load_shipped, placement) == [True] * 2


def _load_and_say(rank, ranks, folders):
    try:
        load_parallel(folders[rank], **LOAD)
    except flashmoe.FlashMoEError as error:
        return type(error).__name__, str(error)
    return None


def test_a_rank_that_cannot_load_ends_the_others_attempt(on_ranks, tmp_path):
    model_of("Mixtral").save_pretrained(tmp_path / "whole")
    without_the_experts_of_others(tmp_path / "whole", tmp_path / "part", 4, 0, 2)
    other, failed = on_ranks(2, _load_and_say, [str(tmp_path / "whole"), str(tmp_path / "part")])
    assert failed[0] == "CheckpointError" and failed[1].startswith("path: expected model.layers.0.")
    message = f"rank 1: expected it to load its share of the model, got CheckpointError: {failed[1]}"
    assert other == ("GroupError", message)


def _under_fsdp(rank, ranks):
    """Whether a model gives the same bits if FSDP2 gathers its weights for each forward pass, in each of two passes."""
    from torch.distributed.fsdp import fully_shard

    model = with_experts(model_of("Qwen3Moe"), NAME)
    with torch.no_grad():
        expected = bits_of(model(batch_of(rank)).logits)
        for layer in model.model.layers:
            fully_shard(layer.mlp)
        return [bits_of(model(batch_of(rank)).logits) == expected for _ in range(2)]


def test_weights_that_fsdp_brings_together(on_ranks):
    assert on_ranks(2, _under_fsdp) == [[True] * 2] * 2


# What is refused


def _refusals(rank, ranks):
    """The messages of what is refused on a rank alone. A refusal leaves the model usable."""
    messages = []

    def note(call):
        with pytest.raises(flashmoe.FlashMoEError) as caught:
            call()
        messages.append(str(caught.value))

    note(lambda: parallelize(model_of("Llama4", moe_layers=[]), **ROOM))
    note(lambda: parallelize(model_of("Mixtral", hidden_act="quick_gelu"), **ROOM))
    model = model_of("Mixtral")
    expected = results_of(with_experts(model, NAME), rank)
    known, model.config = model.config, transformers.PretrainedConfig()
    note(lambda: parallelize(model, **ROOM))
    model.config = known
    context = parallelize(model, **ROOM)
    note(model.state_dict)
    note(lambda: model.save_pretrained("/nowhere"))
    note(lambda: model(torch.zeros(1, 201, dtype=torch.int64)))
    assert results_of(model, rank) == expected
    context.close()
    note(lambda: model(batch_of(0)))
    return messages


def test_what_is_refused_of_a_model_that_is_to_be_spread(on_ranks):
    ((*messages, closed),) = on_ranks(1, _refusals)
    share = (
        r"state_dict: expected model.layers.0.mlp.experts to have all E=4 experts, got the 4 of this rank; "
        "save the model before it is spread over ranks"
    )
    assert [message.partition(";")[0] for message in messages] == [
        "Llama4ForCausalLM: expected experts modules, on Transformers' interface or of Llama 4, got none",
        "MixtralExperts.act_fn: expected one of SiLU, SiLUActivation, silu, GELUActivation, gelu, GELUTanh, "
        "NewGELUActivation, FastGELUActivation, AccurateGELUActivation, got QuickGELUActivation",
        "top_k: expected K, since PreTrainedConfig has no num_experts_per_tok, got None",
        share.partition(";")[0],
        share.partition(";")[0],
        "x: expected at most max_tokens=200 tokens, the context's limit, got T=201",
    ]
    assert closed == "context: expected an open one, got one that is closed"


def test_without_a_process_group():
    with pytest.raises(flashmoe.InvalidArgument, match=r"^group: expected torch\.distributed to be initialised"):
        parallelize(model_of("Mixtral"), **ROOM)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^group: expected torch\.distributed to be initialised"):
        load_parallel("/nowhere", **LOAD)


def _load_of_few_experts(rank, ranks, folder, placement=None):
    torch.distributed.barrier()  # if a rank left earlier, ranks that still connect to it would fail
    load_parallel(folder, max_tokens=200, context_options={"placement": placement})


def test_more_ranks_than_experts(on_ranks, tmp_path):
    model_of("Mixtral", num_local_experts=3).save_pretrained(tmp_path)
    with pytest.raises(RankFailed, match=r"all 4 ranks: InvalidArgument: group: expected at most E=3 ranks, .*, got 4"):
        on_ranks(4, _load_of_few_experts, str(tmp_path))
    with pytest.raises(
        RankFailed, match=r"all 2 ranks: InvalidArgument: placement: .* to have an expert, got none on 1"
    ):
        on_ranks(2, _load_of_few_experts, str(tmp_path), [0, 0, 0])


def test_the_example_writes_the_same_on_every_rank():
    root = Path(__file__).resolve().parents[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with resources.as_file(resources.files("flashmoe") / "assets" / "tiny-qwen3-moe") as folder:
        command = [*torchrun, str(root / "examples" / "generate.py"), str(folder), "It was a truth"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    texts = [text.strip() for text in re.split(r"^rank \d: ", ended.stdout, flags=re.MULTILINE)[1:]]
    assert len(texts) == 2 and texts[0] == texts[1]
    assert texts[0].startswith("It was a truth") and len(texts[0]) > 100


# Experts in slices


def _sliced(rank, ranks, folder, name, placement, how, slices):
    """How far a sliced model's logits are from those of the whole model, relative to its largest logit; how many
    experts' weights the rank has, in whole experts; and whether 12 greedy tokens are equal."""
    whole = with_experts(model_of(name), "eager")
    of_context = {"slices": slices, "placement": placement, "timeout": PATIENCE}
    with torch.no_grad():
        expected = [whole(batch_of(rank, seed)).logits for seed in range(3)]
        tokens = greedy(whole, batch_of(rank))
        elements = sum(module.down_proj.numel() / module.num_experts for module in experts_modules(whole))
        if how == "loaded":
            model = load_parallel(folder, max_tokens=200, context_options=of_context, dtype=torch.float32)
        else:
            parallelize(whole, max_tokens=200, **of_context)
            model = whole
        got = [model(batch_of(rank, seed)).logits for seed in range(3)]
        same = torch.equal(greedy(model, batch_of(rank), synced_gpus=True), tokens)
    with pytest.raises(flashmoe.InvalidArgument, match="slices of this rank; save the model before"):
        model.state_dict()
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))
    return error, sum(module.down_proj.numel() for module in experts_modules(model)) / elements, same


@pytest.mark.parametrize("how", ["loaded", "cut in memory"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Glm4Moe", "Phimoe", "Llama4", "GptOss"])
def test_experts_in_slices(on_ranks, tmp_path, name, how):
    """Each rank cuts out its own slices: of checkpoints with tensors of one expert or of all experts, and of experts
    that are transposed, interleaved, or have biases."""
    model = model_of(name)
    model.save_pretrained(tmp_path)
    experts = experts_modules(model)[0].num_experts
    placement = list(flashmoe.placement.hybrid(experts, 4, 2))
    for error, held, same in on_ranks(4, _sliced, str(tmp_path), name, placement, how, 2):
        assert error <= 1e-5 and same
        assert held == pytest.approx(experts / 4)


def test_a_rank_with_two_slices_of_an_expert(on_ranks, tmp_path):
    model_of("Mixtral").save_pretrained(tmp_path)
    placement = [0, 0, 1, 0, 1, 1, [1, 0], 1]
    shares = []
    for error, held, same in on_ranks(2, _sliced, str(tmp_path), "Mixtral", placement, "loaded", 2):
        assert error <= 1e-5 and same
        shares.append(held)
    assert shares == [2.0, 2.5]


def test_slices_that_a_model_cannot_be_cut_into(on_ranks, tmp_path):
    model_of("Mixtral").save_pretrained(tmp_path)
    for how in ("loaded", "cut in memory"):
        with pytest.raises(RankFailed, match=r"all 2 ranks: InvalidArgument: slices: expected a divisor of I=\d+, got"):
            on_ranks(2, _sliced, str(tmp_path), "Mixtral", None, how, 1023)
