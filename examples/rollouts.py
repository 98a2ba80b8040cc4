"""Roll texts out in batches of several sizes, train on them, and compare the log-probabilities bit for bit.

    python examples/rollouts.py [--prompts N] [--new N] [--batches N [N ...]] [--experts NAME]

Needs Transformers. Reinforcement learning generates texts token by token, in whatever batches a server makes, and then
trains on the whole texts at once. If a token's log-probability differs between the two, training is off its policy.
Here the shipped model continues N prompts greedily, in batches of each of the given sizes. Then a training pass reads
all texts. The experts compute all rows of a batch in one call, with the bits of docs/invariance.md. Everything else is
computed a row at a time, because PyTorch's own products and sums depend on how many rows they have. The model is in
bfloat16 on a GPU, and in float32 on a CPU. Exits with 1 if any log-probability differs in any bit. --experts: another
of Transformers' implementations of experts, such as grouped_mm, for comparison.
"""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from typing import Any

import flashmoe.integrations.transformers  # noqa: F401
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache, Qwen3MoeForCausalLM

PROMPT = 12
"""Tokens of a prompt."""


def forward(model: Qwen3MoeForCausalLM, ids: Tensor, caches: list[DynamicCache]) -> Tensor:
    """The logits [B, L, vocabulary] behind the tokens `ids` [B, L], which follow those that each text's cache has."""
    inner, first = model.model, caches[0].get_seq_length()
    places = [(text, token) for text in range(ids.shape[0]) for token in range(ids.shape[1])]
    rows = [inner.embed_tokens(ids[place].view(1, 1)) for place in places]
    positions = [torch.tensor([[first + token]], device=ids.device) for _, token in places]
    layers: list[Any] = list(inner.layers)
    for layer in layers:
        attended = []
        for row, (text, _), position in zip(rows, places, positions, strict=True):
            angles = inner.rotary_emb(row, position)
            normed = layer.input_layernorm(row)
            attention, _ = layer.self_attn(
                hidden_states=normed, position_embeddings=angles, attention_mask=None, past_key_values=caches[text]
            )
            attended.append(row + attention)
        normed = [layer.post_attention_layernorm(row)[0] for row in attended]
        _, weights, experts = zip(*(layer.mlp.gate(row) for row in normed), strict=True)
        made = layer.mlp.experts(torch.cat(normed), torch.cat(experts), torch.cat(weights))  # all rows in one call
        rows = [row + made[i] for i, row in enumerate(attended)]
    return torch.stack([model.lm_head(inner.norm(row))[0, 0] for row in rows]).view(*ids.shape, -1)


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities [B, L] of `tokens` [B, L] by logits [B, L, vocabulary], a row at a time."""
    rows = logits.float().flatten(0, 1)
    picked = [row.log_softmax(0)[token] for row, token in zip(rows, tokens.flatten(), strict=True)]
    return torch.stack(picked).view(tokens.shape)


def roll_out(model: Qwen3MoeForCausalLM, prompts: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """The prompts [B, L] with `new` tokens each behind them, and the log-probabilities [B, new] of these."""
    caches = [DynamicCache() for _ in prompts]
    tokens, told = [prompts], []
    with torch.no_grad():
        for _ in range(new):
            logits = forward(model, tokens[-1], caches)[:, -1:]
            tokens.append(logits.argmax(dim=-1))
            told.append(chosen(logits, tokens[-1]))
    return torch.cat(tokens, dim=1), torch.cat(told, dim=1)


def in_batches(model: Qwen3MoeForCausalLM, prompts: Tensor, new: int, batch: int) -> tuple[Tensor, Tensor]:
    """What `roll_out` returns, of batches of so many prompts."""
    texts, told = zip(*(roll_out(model, part, new) for part in torch.split(prompts, batch)), strict=True)
    return torch.cat(texts), torch.cat(told)


def train(model: Qwen3MoeForCausalLM, texts: Tensor) -> Tensor:
    """The log-probabilities of the new tokens of all texts, in a pass that computes gradients."""
    logits = forward(model, texts[:, :-1], [DynamicCache() for _ in texts])
    told = chosen(logits[:, PROMPT - 1 :], texts[:, PROMPT:])
    torch.autograd.backward(-told.mean())
    return told.detach()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=16, help="tokens behind each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 7, 64], help="prompts of a batch")
    parser.add_argument("--experts", default="flashmoe")
    args = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with resources.as_file(resources.files("flashmoe") / "assets") as assets:
        model: Any = Qwen3MoeForCausalLM.from_pretrained(
            assets / "tiny-qwen3-moe", experts_implementation=args.experts, dtype=dtype
        )
        with safe_open(assets / "tiny-qwen3-moe-hidden-states.safetensors", "pt") as file:
            ids = file.get_tensor("token_ids").long().to(device)
    model = model.to(device)
    prompts = ids[: args.prompts * PROMPT].view(args.prompts, PROMPT)
    rolled = {batch: in_batches(model, prompts, args.new, batch) for batch in args.batches}
    texts, told = rolled[args.batches[0]]
    trained = train(model, texts)
    different = 0
    for what, others in {**{f"batches of {n}": rolled[n] for n in args.batches}, "training": (texts, trained)}.items():
        same = torch.equal(others[0], texts) and torch.equal(others[1], told)
        different += not same
        print(f"{what}: {'the same bits' if same else 'OTHER BITS'}, mean log-probability {others[1].mean():.6f}")
    return int(different != 0)


if __name__ == "__main__":
    sys.exit(main())
