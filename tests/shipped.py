"""The trained model that the package ships, for tests of both engines: the texts that it writes, and its perplexity."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ASSETS = Path(str(resources.files("flashmoe"))) / "assets"
FOLDER = ASSETS / "tiny-qwen3-moe"
STEPS = 200
PROMPTS = ("It was a truth", "The family of Dashwood had", "She had been", "Mr. Elton")
"""One for each rank."""
WINDOW = 512
"""Tokens that the model reads at once."""
ALIKE = 0.002
"""The most by which the perplexity may differ from that of eager experts, relative to it, both in bfloat16: three times
the difference between eager experts in bfloat16 and in float32."""


def loaded(**options: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, **options).eval()


def text_of(model: torch.nn.Module, prompt: str, **options: Any) -> str:
    """The prompt and `STEPS` tokens after it, each the likeliest."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    exactly = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    return tokenizer.decode(model.generate(ids, attention_mask=torch.ones_like(ids), **exactly, **options)[0])


def windows() -> list[torch.Tensor]:
    """A passage of 2048 tokens from the end of Persuasion, on which the model was not trained, in parts of `WINDOW`."""
    with safe_open(ASSETS / "tiny-qwen3-moe-hidden-states.safetensors", "pt") as file:
        return list(file.get_tensor("token_ids").long().split(WINDOW))


@torch.no_grad()
def losses_of(model: torch.nn.Module, mine: list[torch.Tensor]) -> float:
    """The sum of the cross-entropies of the windows' tokens, in nats."""
    total = 0.0
    for ids in mine:
        ids = ids.to(model.device)
        logits = model(ids[None]).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    return total


def perplexity(losses: float) -> float:
    return math.exp(losses / sum(len(ids) - 1 for ids in windows()))
