"""A model whose experts FlashMoE does not compute is refused as soon as it takes FlashMoE's name, before it has
weights."""

from __future__ import annotations

import pytest
import torch
from flashmoe import InvalidArgument

transformers = pytest.importorskip("transformers")

from flashmoe.integrations.transformers import check, fuse  # noqa: E402
from flashmoe.integrations.transformers.check import register_check  # noqa: E402
from flashmoe.integrations.transformers.experts import NAME  # noqa: E402
from test_transformers import ARCHITECTURES, SMALL, config_of, model_of  # noqa: E402

NO_FUNCTION = r"^MixtralExperts\.act_fn: expected one of .*, got QuickGELUActivation"


def on_meta(name, **changes):
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config_of(name, **changes))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_on_meta_that_is_computed(name):
    check(on_meta(name))


def test_a_model_on_meta_that_is_not_computed():
    with pytest.raises(InvalidArgument, match=NO_FUNCTION) as caught:
        check(on_meta("Mixtral", hidden_act="quick_gelu"))
    assert len(str(caught.value).splitlines()) == 1  # one line, although the model has two such layers


def test_a_model_without_experts():
    config = transformers.LlamaConfig(**SMALL)
    model, refused = transformers.LlamaForCausalLM(config), r"^LlamaForCausalLM: expected a model with experts, got"
    for says in (check, lambda model: model.set_experts_implementation(NAME)):
        with pytest.raises(InvalidArgument, match=refused):
            says(model)
    model.set_experts_implementation("eager")


def test_a_checkpoint_is_refused_before_its_weights_are_read(tmp_path):
    model_of("Mixtral", hidden_act="quick_gelu").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=NO_FUNCTION):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME)


@pytest.mark.parametrize("how", ["as a configuration", "as an argument"])
def test_a_model_made_with_our_name_is_refused(how):
    config, options = config_of("Llama4"), {}
    if how == "as a configuration":
        config._experts_implementation = NAME
    else:
        options = {"experts_implementation": NAME}
    with pytest.raises(InvalidArgument, match=r"^Llama4TextMoe: expected experts on Transformers' experts interface"):
        transformers.AutoModelForCausalLM.from_config(config, **options)


class OwnBlock(torch.nn.Module):
    """A block like those of models that bring their own code."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])


def test_experts_of_models_with_their_own_code():
    model = model_of("Qwen3Moe")
    model.model.layers[0].mlp = OwnBlock()
    with pytest.raises(InvalidArgument, match=r"^ModuleList: expected experts on Transformers' experts interface"):
        model.set_experts_implementation(NAME)


def test_a_fused_model_is_computed():
    for name in ("Llama4", "DeepseekV3"):
        check(fuse(model_of(name)))


def test_a_part_without_experts_is_not_refused():
    """A larger model gives FlashMoE's name to all its parts, for example to a vision encoder, which has no experts."""
    config = transformers.LlamaConfig(**SMALL)
    config._experts_implementation = NAME
    transformers.LlamaForCausalLM(config)


def test_methods_are_wrapped_once():
    before = transformers.PreTrainedModel.post_init
    register_check()
    assert transformers.PreTrainedModel.post_init is before
