"""Whole blocks of Transformers' models as calls of the operator, on the CPU engine, against eager experts."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref

import flashmoe
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from flashmoe.integrations.transformers import fuse  # noqa: E402
from flashmoe.integrations.transformers.experts import experts_modules  # noqa: E402
from small_models import small_model  # noqa: E402
from test_transformers import ARCHITECTURES, PROMPT, VOCABULARY, greedy, logits_of, model_of, stored  # noqa: E402

FUSED = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV3", "Glm4Moe", "Qwen3Next", "Llama4")


def block_of(model):
    """The first block with experts, and its router."""
    block = next(each for each in model.modules() if hasattr(each, "experts"))
    return block, block.router if hasattr(block, "router") else block.gate


@pytest.fixture(scope="module", params=FUSED)
def models(request):
    """A model with eager experts, and a fused copy. If the router has a bias of the choice, it is not 0, so that
    results depend on where it is added."""
    model = model_of(request.param)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(buffer, 0.0, 0.3)
    model.set_experts_implementation("eager")
    return model, fuse(copy.deepcopy(model))


def test_logits_are_those_of_the_model(models):
    tokens = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
    expected, got = (logits_of(model, tokens) for model in models)
    assert (got - expected).abs().max() <= 1e-5


def test_greedy_tokens_are_those_of_the_model(models):
    expected, got = (greedy(model, PROMPT, 64) for model in models)
    assert torch.equal(got, expected)


def classes_called(call):
    """The classes of modules whose forward runs during `call`, as a profile function of Python sees it."""
    seen = set()

    def profiled(frame, event, _):
        if event == "call" and frame.f_code.co_name == "forward":
            seen.add(type(frame.f_locals.get("self")))

    sys.setprofile(profiled)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_the_router_is_not_called(models):
    model = models[1]
    if isinstance(model, transformers.Llama4ForCausalLM):
        pytest.skip("a block of Llama 4 returns its router's logits")
    router = type(block_of(model)[1])
    assert router not in classes_called(lambda: logits_of(model, PROMPT))
    assert router in classes_called(lambda: logits_of(models[0], PROMPT))


def shared_of(block):
    """The shared expert of a block that has one, and its weights of gate and up."""
    shared = getattr(block, "shared_expert", None) or block.shared_experts
    return shared, shared.gate_proj.weight, shared.up_proj.weight


@pytest.mark.parametrize("name", ["Qwen2Moe", "DeepseekV3", "Glm4Moe"])
def test_a_shared_expert_is_in_the_call(name):
    model = model_of(name)
    model.set_experts_implementation("eager")
    expected = logits_of(model, PROMPT)
    fuse(model)
    places = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    blocks = [each for each in model.modules() if hasattr(each, "experts")]
    x = torch.randn(1, 9, model.config.hidden_size)
    with torch.no_grad():
        assert type(shared_of(block_of(model)[0])[0]) not in classes_called(lambda: [block(x) for block in blocks])
    assert (logits_of(model, PROMPT) - expected).abs().max() <= 1e-5
    assert list(model.state_dict()) == list(places)
    for key, value in model.state_dict().items():
        assert value.data_ptr() == places[key][0] and torch.equal(value, places[key][1])


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("name", ["Qwen2Moe", "DeepseekV3", "Glm4Moe"])
def test_the_weights_of_a_shared_expert_are_read_where_they_are(monkeypatch, name, grad):
    model = fuse(model_of(name))
    block, _ = block_of(model)
    shared, gate, up = shared_of(block)
    seen, made = [], []
    of_fuse, cat = sys.modules[fuse.__module__], torch.cat
    call = of_fuse.call
    monkeypatch.setattr(of_fuse, "call", lambda *args: seen.append(args[1]) or call(*args))
    monkeypatch.setattr(torch, "cat", lambda *args, **options: made.append(args) or cat(*args, **options))
    x = torch.randn(1, 9, model.config.hidden_size, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        y = block(x)
    if grad:
        y.square().sum().backward()
        assert gate.grad.any() and up.grad.any()
    assert not made
    (tensors,) = seen
    given = (tensors.shared_gate_up, tensors.shared_up, tensors.shared_down)
    for each, weight in zip(given, (gate, up, shared.down_proj.weight), strict=True):
        assert each.data_ptr() == weight.data_ptr() and each.shape == weight.shape


def test_a_shared_expert_with_a_strided_weight_computes_itself():
    model = model_of("Qwen2Moe")
    model.set_experts_implementation("eager")
    expected = logits_of(model, PROMPT)
    fuse(model)
    shared, _, up = shared_of(block_of(model)[0])
    up.data = torch.cat([up.data, up.data], 1)[:, : up.shape[1]]
    block, _ = block_of(model)
    assert type(shared) in classes_called(lambda: block(torch.randn(1, 9, model.config.hidden_size)))
    assert (logits_of(model, PROMPT) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("change", ["in place", "replaced", "copied", "moved"])
def test_a_shared_expert_that_changes_is_seen(change):
    model = fuse(model_of("Qwen2Moe"))
    logits_of(model, PROMPT)
    if change == "copied":
        model = copy.deepcopy(model)
    _, gate, up = shared_of(block_of(model)[0])
    with torch.no_grad():
        if change == "replaced":
            up.data = up.data + 1.0
        elif change == "moved":
            model.double().float()
        up.mul_(2.0)
        gate.add_(0.5)
    plain = model_of("Qwen2Moe")
    plain.load_state_dict(model.state_dict())
    plain.set_experts_implementation("eager")
    assert (logits_of(model, PROMPT) - logits_of(plain, PROMPT)).abs().max() <= 1e-5


def test_gradients_in_eval_mode_reach_gate_and_up():
    gradients = []
    for change in (lambda model: model.set_experts_implementation("eager"), fuse):
        model, tokens = model_of("Qwen2Moe"), torch.tensor(PROMPT)
        change(model)
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-5, rtol=1e-4, msg=name)


def test_a_model_trains_after_a_call_in_inference_mode():
    model, tokens = fuse(model_of("Qwen2Moe")), torch.tensor(PROMPT)
    with torch.inference_mode():
        model(tokens)
    assert not any(each.is_inference() for each in model.parameters())
    model.train()(tokens, labels=tokens).loss.backward()
    assert shared_of(block_of(model)[0])[2].grad is not None


def test_who_held_the_weights_before_a_call_still_does():
    model = fuse(model_of("Qwen2Moe").share_memory())
    held = model.state_dict()
    before = logits_of(model, PROMPT)
    held["model.layers.0.mlp.shared_expert.up_proj.weight"].zero_()
    assert (logits_of(model, PROMPT) - before).abs().max() > 0.1
    assert all(each.is_shared() for each in model.parameters())


def doubled(value):
    """A module's result, doubled. In the tuple that a router returns, only the weights are doubled, not the logits."""
    if isinstance(value, torch.Tensor):
        return value * 2.0
    at = 1 if value[1].is_floating_point() and len(value) == 3 else 0
    return (*value[:at], value[at] * 2.0, *value[at + 1 :])


def patched(module):
    forward = module.forward
    module.forward = lambda *args: doubled(forward(*args))


def patched_class(module, monkeypatch):
    forward = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda self, *args: doubled(forward(self, *args)))


def subclassed(module):
    forward = type(module).forward
    module.__class__ = type("Another", (type(module),), {"forward": lambda self, *args: doubled(forward(self, *args))})


WATCHED = {
    "hook": lambda module, _: module.register_forward_hook(lambda _, args, output: doubled(output)),
    "pre-hook": lambda module, _: module.register_forward_pre_hook(lambda _, args: (args[0] * 2.0, *args[1:])),
    "patched": lambda module, _: patched(module),
    "patched class": patched_class,
    "subclassed": lambda module, _: subclassed(module),
}


@pytest.mark.parametrize("where", ["router", "experts"])
@pytest.mark.parametrize("what", WATCHED)
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3", "Llama4"])
def test_what_a_call_would_pass_by_runs_and_is_named_once(name, what, where, monkeypatch):
    models = []
    for change in (lambda model: model.set_experts_implementation("eager"), fuse):
        model = model_of(name)
        change(model)
        before = logits_of(model, PROMPT)
        models.append((model, before))
    with monkeypatch.context() as patch:
        for model, _ in models[:1] if what == "patched class" else models:
            found, router = block_of(model)
            WATCHED[what](router if where == "router" else found.experts, patch)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            expected, got = (logits_of(model, PROMPT) for model, _ in models)
            logits_of(models[1][0], PROMPT)
    assert (expected - models[0][1]).abs().max() > 0.01
    assert (got - expected).abs().max() <= 1e-5
    messages = [str(each.message) for each in said if "not as one call of FlashMoE" in str(each.message)]
    layers = {each.split(":")[0] for each in messages}
    assert messages and len(messages) == len(layers) and all(each.startswith("model.layers.") for each in layers)
    attribute = "experts" if where == "experts" else "router" if name == "Llama4" else "gate"
    assert all(f": {attribute} has " in each for each in messages), messages


def test_a_hook_of_all_modules_runs():
    model = fuse(model_of("Qwen3Moe"))
    seen = set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(type(module)))
    with pytest.warns(UserWarning, match=r"^model\.layers\.0\.mlp: every module has a hook of all modules"):
        logits_of(model, PROMPT)
    handle.remove()
    assert {type(block_of(model)[0].experts), type(block_of(model)[1])} <= seen


@pytest.mark.parametrize("where", ["block", "router", "experts"])
def test_a_forward_that_was_set_before_is_refused(where):
    model = model_of("Qwen3Moe")
    block, router = block_of(model)
    patched({"block": block, "router": router, "experts": block.experts}[where])
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^Qwen3MoeSparseMoeBlock.*expected the forward that .*, got a f"
    ):
        fuse(model)


def test_hooks_on_an_activation_are_refused():
    block = block_of(fuse(model_of("Qwen3Moe")))[0]
    block.experts.act_fn.register_forward_hook(lambda *_: None)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^Qwen3MoeExperts\.act_fn: expected .*, got a forward hook"):
        block(torch.randn(1, 3, 32))


def test_fusing_twice_changes_nothing(models):
    kinds = [type(each) for each in models[1].modules()]
    assert [type(each) for each in fuse(models[1]).modules()] == kinds


def test_a_fused_model_is_pickled(tmp_path):
    for name in ("Qwen2Moe", "Llama4"):
        model = fuse(model_of(name))
        expected = logits_of(model, PROMPT)
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        assert type(block_of(again)[0]) is type(block_of(model)[0])
        assert torch.equal(logits_of(again, PROMPT), expected)


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe"])
def test_a_router_in_float32_chooses_by_itself(name):
    """In a model in bfloat16, a router that is kept in float32, as in Transformers from release 5.24 on, chooses
    experts itself, before the call."""
    model = model_of(name, torch.bfloat16)
    block, router = block_of(model)
    with torch.no_grad():
        router.float().weight.add_(torch.randn(router.weight.shape) * 1e-3)  # no longer numbers of bfloat16
        x = torch.randn(1, 200, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
        model.set_experts_implementation("eager")
        expected = block(x)[0].float()
        fuse(model)
        off = (block(x)[0].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(off.max()) < 0.1  # with another expert, a row would be off by about 1


def test_a_hook_on_the_shared_expert_is_called():
    model = fuse(model_of("Qwen2Moe"))
    expected, seen = logits_of(model, PROMPT), []
    shared, _, _ = shared_of(block_of(model)[0])
    for module in (shared, shared.up_proj):
        with_hook = module.register_forward_hook(lambda *_: seen.append(1))
        assert (logits_of(model, PROMPT) - expected).abs().max() <= 1e-5
        with_hook.remove()
    assert len(seen) == 2


def test_router_logits_are_there_when_they_are_asked_for(models):
    with torch.no_grad():
        try:
            expected, got = (model(torch.tensor(PROMPT), output_router_logits=True) for model in models)
        except TypeError:
            pytest.skip("the architecture offers none")
    if getattr(expected, "router_logits", None) is None:
        pytest.skip("the architecture offers none")
    for ours, theirs in zip(got.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(ours, theirs)
    tokens = logits_of(models[1], PROMPT)  # the hooks that collect the router's logits are idle now
    assert (tokens - expected.logits).abs().max() <= 1e-5


def test_a_hook_on_the_router_is_called(models):
    seen = []
    handle = block_of(models[1])[1].register_forward_hook(lambda *_: seen.append(1))
    logits_of(models[1], PROMPT)
    handle.remove()
    assert seen
    logits_of(models[1], PROMPT)
    assert len(seen) == 1


def test_a_fused_model_is_saved_as_it_was(models, tmp_path):
    for model, folder in zip(models, ("eager", "fused"), strict=True):
        model.save_pretrained(tmp_path / folder)
    assert stored(tmp_path / "fused") == stored(tmp_path / "eager")
    again = type(models[1]).from_pretrained(tmp_path / "fused").eval()
    assert torch.equal(logits_of(fuse(copy.deepcopy(again)), PROMPT), logits_of(models[1], PROMPT))
    assert (logits_of(again, PROMPT) - logits_of(models[1], PROMPT)).abs().max() <= 1e-5


def test_weights_that_change_in_place_are_seen(models):
    model = copy.deepcopy(models[1])
    before = logits_of(model, PROMPT)
    with torch.no_grad():
        for experts in experts_modules(model):
            experts.down_proj.mul_(2.0)
    assert (logits_of(model, PROMPT) - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_block_compiles_whole(name):
    block, router = block_of(fuse(model_of(name)))
    x = torch.randn(1, 6, router.weight.shape[1])
    with torch.no_grad():
        expected = block(x)
        explained = torch._dynamo.explain(block)(x)
        assert (explained.graph_break_count, explained.graph_count) == (0, 1), explained
        got = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    # In compiled code, a shared expert is not in the call: its own module computes it, with another order of sums.
    shared = hasattr(block, "shared_expert") or hasattr(block, "shared_experts")
    torch.testing.assert_close(got, expected, atol=1e-5 if shared else 0.0, rtol=0.0)


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_bfloat16_routes_as_the_model_does(name):
    """One model's router rounds its logits to bfloat16, the other's computes in float32. Fused blocks choose the same
    experts as either."""
    model = model_of(name, torch.bfloat16)
    model.set_experts_implementation("eager")
    block, _ = block_of(model)
    x = torch.randn(1, 200, block.gate.weight.shape[1], generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        expected = block(x)[0].float()
        logits = block.gate(x[0])[0].float()
        fuse(model)
        got = block(x)[0].float()
    falling = logits.sort(dim=-1, descending=True).values
    # Where the last chosen logit is equal to the next, a model may choose either expert.
    told_apart = falling[:, block.gate.top_k - 1] > falling[:, block.gate.top_k]
    assert told_apart.float().mean() > 0.9
    off = ((got - expected).norm(dim=-1) / expected.norm(dim=-1))[told_apart]
    assert float(off.max()) < 0.1  # with another expert, a row would be off by about 1


CHANGES = [
    ("Qwen3Moe", {"norm_topk_prob": False}),
    ("Olmoe", {"norm_topk_prob": True}),
    ("DeepseekV3", {"norm_topk_prob": False}),
    ("DeepseekV3", {"routed_scaling_factor": 0.7}),
    ("DeepseekV3", {"n_group": 2, "topk_group": 1}),
    ("Glm4Moe", {"n_group": 4, "topk_group": 2}),
    ("Mixtral", {"hidden_act": "gelu"}),
    ("Mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
    ("Llama4", {"hidden_act": "gelu"}),
    ("Llama4", {"num_experts_per_tok": 3}),
    ("Llama4", {"moe_layers": [0, 1]}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES)
def test_what_a_configuration_changes_is_computed(name, changes):
    model = model_of(name, **changes)
    model.set_experts_implementation("eager")
    expected = logits_of(model, PROMPT)
    assert (logits_of(fuse(model), PROMPT) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("folder", ["jamba", "granitemoe"])
def test_blocks_that_are_not_known_are_refused(folder):
    model = small_model(folder)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(flashmoe.InvalidArgument, match=r"^\w+: expected a block that can be fused, one of .*Mixtral"):
        fuse(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(FUSED)))
def test_blocks_whose_router_is_not_computed_stay_and_flashmoe_computes_their_experts(name):
    model = model_of(name)
    model.set_experts_implementation("eager")
    expected, kinds = logits_of(model, PROMPT), [type(module) for module in model.modules()]
    fuse(model)
    assert [type(module) for module in model.modules()] == kinds
    assert model.get_experts_implementation() == {"": "flashmoe"}
    assert (logits_of(model, PROMPT) - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_a_softmax_of_the_model_s_type_is_the_router_s_own():
    """Mistral 4's router rounds its scores to the model's type, which makes some equal. The operator does not round
    them, and would choose other experts, so the router itself chooses."""
    model = small_model("mistral4").bfloat16()
    model.set_experts_implementation("eager")
    block, router = block_of(model)
    x = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = block(x)[0].float()
    fuse(model)
    assert type(router) in classes_called(lambda: block(x))
    off = (block(x)[0].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(off.max()) < 0.1  # with another expert, a row would be off by about 1
    model.float()
    assert type(router) not in classes_called(lambda: block(x.float()))


def test_models_without_such_blocks_are_refused():
    dense = model_of("Llama4", moe_layers=[])
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^Llama4ForCausalLM: expected Mixture-of-Experts blocks, got n"
    ):
        fuse(dense)
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^Llama4TextExperts\.act_fn: expected .*, got QuickGELUActivation"
    ):
        fuse(model_of("Llama4", hidden_act="quick_gelu"))


def test_a_router_of_another_kind_is_refused():
    model = model_of("Qwen3Moe")
    block, _ = block_of(model)
    block.gate = torch.nn.Linear(32, 6)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^Qwen3MoeSparseMoeBlock\.gate: expected Qwen3MoeTopKRouter"):
        fuse(model)


def set_on(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)


def replaced(block):
    block.experts.down_proj = torch.nn.Parameter(block.experts.down_proj.detach() * 2.0)


def assigned(block):
    state = {name: value + 0.1 for name, value in block.state_dict().items()}
    block.load_state_dict(state, assign=True)


def other_storage(block):
    for weight in (block.experts.gate_up_proj, block.gate.weight):
        weight.data = weight.data * 2.0


def other_modules(block):
    block.gate = copy.deepcopy(block.gate)
    block.experts = copy.deepcopy(block.experts)
    other_storage(block)


LATER = {
    "norm_topk_prob": ("Qwen3Moe", lambda block: set_on(block.gate, norm_topk_prob=not block.gate.norm_topk_prob)),
    "top_k": ("Qwen3Moe", lambda block: set_on(block.gate, top_k=3)),
    "routed_scaling_factor": ("DeepseekV3", lambda block: set_on(block.gate, routed_scaling_factor=0.3)),
    "groups": ("DeepseekV3", lambda block: set_on(block.gate, topk_group=1)),
    "choice bias": ("DeepseekV3", lambda block: block.gate.e_score_correction_bias.copy_(torch.arange(8.0))),
    "activation": ("Mixtral", lambda block: set_on(block.experts, act_fn=transformers.activations.ACT2FN["gelu"])),
    "replaced": ("Qwen3Moe", replaced),
    "assigned": ("Qwen2Moe", assigned),
    "other storage": ("Qwen2Moe", other_storage),
    "other modules": ("Qwen2Moe", other_modules),
    "other shared expert": ("Qwen2Moe", lambda block: set_on(block.shared_expert, act_fn=torch.nn.GELU())),
    "another type": ("DeepseekV3", lambda block: block.to(torch.bfloat16)),
}


@torch.no_grad()
@pytest.mark.parametrize("case", LATER)
def test_what_is_changed_after_a_call_is_seen(case):
    """A fused block that was called before a change gives the result of a block that is fused after the change."""
    name, change = LATER[case]
    plain, fused = model_of(name), fuse(model_of(name))
    block = block_of(fused)[0]
    x = torch.randn(1, 9, fused.config.hidden_size, generator=torch.Generator().manual_seed(5))
    before = block(x)
    change(block), change(block_of(plain)[0])
    x = x.to(block.experts.down_proj.dtype)
    expected = block_of(fuse(plain))[0](x)
    for each in (block, copy.deepcopy(block)):
        assert torch.equal(each(x), expected)
    assert not torch.equal(before.to(x.dtype), expected)


@torch.no_grad()
def test_what_is_changed_after_a_call_is_refused():
    block = block_of(fuse(model_of("Qwen3Moe")))[0]
    x = torch.randn(1, 9, 32)
    expected = block(x)
    for name, value in (("has_post_expert_norm", True), ("num_experts", 4), ("is_concatenated", False)):
        usual = getattr(block.experts, name, False)  # not every release has all of these attributes
        setattr(block.experts, name, value)
        with pytest.raises(flashmoe.InvalidArgument, match=r"^Qwen3MoeExperts"):
            block(x)
        setattr(block.experts, name, usual)
        assert torch.equal(block(x), expected)


@torch.no_grad()
def test_old_weights_are_not_kept():
    block = block_of(fuse(model_of("Qwen2Moe")))[0]
    x = torch.randn(1, 9, 32)
    memory = torch.ones(6, 32, 24).numpy().copy()
    block.experts.down_proj = torch.nn.Parameter(torch.from_numpy(memory))
    memory = weakref.ref(memory)
    block(x)
    block.experts.down_proj.data = block.experts.down_proj * 2.0
    gc.collect()
    assert memory() is None


class Seen(TorchDispatchMode):
    """A mode that notes the names of the operators that go through PyTorch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["block", "experts"])
def test_the_dispatcher_is_asked_where_pytorch_has_a_part(kind):
    """Within a mode, the call goes through the dispatcher as an operator, which the mode sees, with gradients and
    without. Otherwise the call goes past the dispatcher, which is quicker."""
    model = model_of("Qwen3Moe")
    block = block_of(fuse(model))[0]
    x = torch.randn(7, 32)
    if kind == "block":
        call = lambda: block(x[None])[0]  # noqa: E731
    else:
        routing = block.gate(x)[1:][::-1]
        call = lambda: block.experts(x, routing[0], routing[1].detach())  # noqa: E731

    def dispatched():
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            y = call()
        return sum(event.name in ("flashmoe::moe", "flashmoe::moe_kept") for event in seen.events()), y

    with torch.no_grad():
        count, expected = dispatched()
        assert count == 0
        with Seen() as mode:
            assert torch.equal(call(), expected)
        assert sum("flashmoe.moe" in name for name in mode.names) == 1
    count, y = dispatched()
    assert count == 0 and y.requires_grad and torch.equal(y, expected)
    with Seen() as mode:
        assert torch.equal(call(), expected)
    assert sum("flashmoe.moe_kept" in name for name in mode.names) == 1
    model.requires_grad_(False)
    assert dispatched()[0] == 0
