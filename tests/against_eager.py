"""Compares a small model that uses FlashMoE with the same model with Transformers' eager experts: if FlashMoE is chosen
by its name, if the model's blocks are fused, and after the model was saved and read again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flashmoe import InvalidArgument
from flashmoe.integrations.transformers import experts_forward, fuse
from flashmoe.integrations.transformers.experts import NAME, experts_modules
from flashmoe.integrations.transformers.fuse import BLOCKS
from small_models import VOCABULARY, classes_of_experts, small_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

STEPS = 8
"""How many tokens a model adds to a prompt."""
BAR = 1e-5
"""The largest allowed difference from eager logits or gradients, relative to the largest of these."""


class Result(NamedTuple):
    """The results of a model that are compared."""

    logits: Tensor
    gradients: dict[str, Tensor]
    tokens: Tensor


def prompt() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(2))


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model's logits. For a model without a head: the products of its last hidden states with its embeddings."""
    further = {}
    if "moe_mm_token_type_ids" in inspect.signature(model.forward).parameters:  # tokens of images use other experts
        further["moe_mm_token_type_ids"] = (ids % 3 == 0).int()
    output = model(input_ids=ids, use_cache=False, **further)
    if getattr(output, "logits", None) is not None:
        return output.logits
    return output.last_hidden_state @ model.get_input_embeddings().weight.T


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: Tensor) -> Tensor:
    if model.can_generate():
        return model.generate(ids, do_sample=False, max_new_tokens=STEPS, min_new_tokens=STEPS)
    for _ in range(STEPS):
        ids = torch.cat([ids, logits_of(model, ids)[:, -1:].argmax(-1)], 1)
    return ids


def result_of(model: PreTrainedModel) -> Result:
    ids = prompt()
    model.zero_grad()
    logits = logits_of(model, ids)
    logits.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Result(logits.detach(), gradients, greedy(model, ids[:1, :8]))


def difference(got: Tensor, expected: Tensor, largest: float | None = None) -> float:
    """The largest difference of two elements, relative to `largest` (by default the largest expected value)."""
    return (got - expected).abs().max().item() / (largest or expected.abs().max().item())


def compared(got: Result, expected: Result) -> dict[str, float]:
    """Three differences: of the logits; of all gradients, relative to the model's largest gradient; and of the experts'
    gradients, where each parameter's is relative to the parameter's own largest. Raises `AssertionError` if a
    difference is above `BAR`, or if generated tokens differ."""
    assert got.gradients.keys() == expected.gradients.keys()
    largest = max(each.abs().max().item() for each in expected.gradients.values())
    pairs = {name: (got.gradients[name], each) for name, each in expected.gradients.items()}
    found = {
        "logits": difference(got.logits, expected.logits),
        "gradients": max(difference(*pair, largest) for pair in pairs.values()),
        "gradients of experts": max(difference(*pair) for name, pair in pairs.items() if ".experts." in name),
    }
    assert all(each <= BAR for each in found.values()), found
    assert torch.equal(got.tokens, expected.tokens)
    return {name: float(f"{each:.1e}") for name, each in found.items()}


@contextmanager
def calls() -> Iterator[list[torch.nn.Module]]:
    """Yields a list to which an experts module is added whenever FlashMoE's implementation is called for it."""
    called: list[torch.nn.Module] = []

    def counted(module: torch.nn.Module, *arguments: Any, **options: Any) -> Tensor:
        called.append(module)
        return experts_forward(module, *arguments, **options)

    ExpertsInterface.register(NAME, counted)
    try:
        yield called
    finally:
        ExpertsInterface.register(NAME, experts_forward)


def effect_of_experts(model: PreTrainedModel, logits: Tensor) -> float:
    """The difference between `logits` and the logits that the model has if its experts compute zeros."""
    modules = experts_modules(model)
    kept = [each.down_proj.data for each in modules]
    for each in modules:
        each.down_proj.data = torch.zeros_like(each.down_proj)
    with torch.no_grad():
        without = logits_of(model, prompt())
    for each, data in zip(modules, kept, strict=True):
        each.down_proj.data = data
    return difference(without, logits)


def by_name(model: PreTrainedModel, expected: Result) -> dict[str, float]:
    """The differences if FlashMoE is chosen by its name. Asserts that it is then called for all experts modules."""
    model.set_experts_implementation(NAME)
    with calls() as called:
        found = compared(result_of(model), expected)
    assert {id(each) for each in called} == {id(each) for each in experts_modules(model)}
    return found


def read_again(model: PreTrainedModel, folder: Path, choose: Callable[[PreTrainedModel], Any]) -> None:
    """Saves the model, reads it again, has `choose` choose FlashMoE for the model that was read, and compares weights
    and logits. (Logits may differ by `BAR`: the bits of PyTorch's own products depend on the weights' addresses.)"""
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    choose(again)
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    with torch.no_grad():
        assert difference(logits_of(again, prompt()), logits_of(model, prompt())) <= BAR


def fused(model: PreTrainedModel, expected: Result) -> dict[str, float]:
    """The differences if the model's blocks are fused. Asserts that experts modules are called only in blocks that
    `fuse` has not turned into one call."""
    fuse(model)
    kept = [
        each for each in model.modules() if hasattr(each, "experts") and not hasattr(type(each), "_flashmoe_computes")
    ]
    with calls() as called:
        found = compared(result_of(model), expected)
    assert {id(each) for each in called} == {id(each.experts) for each in kept}
    return found


def can_fuse(folder: str) -> bool:
    return any(folder == known for known, _ in BLOCKS)


def outcome(folder: str, saved: Path) -> dict[str, Any]:
    """What FlashMoE does with the model of a folder of Transformers: the differences if it is chosen by its name and if
    blocks are fused, or the text of the refusal. Raises `AssertionError` for a model that it takes and computes
    wrongly."""
    model = small_model(folder)
    on_interface = {type(each).__name__ for each in experts_modules(model)}
    experts = sorted(on_interface) or classes_of_experts(folder)
    said: dict[str, Any] = {"model": type(model).__name__, "experts": experts}
    try:
        model.set_experts_implementation(NAME)
    except InvalidArgument as error:
        said["refused"] = str(error)
        if not can_fuse(folder):
            return said
    model.set_experts_implementation("eager")
    expected = result_of(model)
    assert effect_of_experts(model, expected.logits) > 0.1
    if "refused" not in said:
        said["by name"] = by_name(model, expected)
        read_again(model, saved / "by name", lambda again: again.set_experts_implementation(NAME))
    if can_fuse(folder):
        said["fused"] = fused(model, expected)
        read_again(model, saved / "fused", fuse)
    return said
