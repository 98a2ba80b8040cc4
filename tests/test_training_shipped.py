"""Further training of the shipped model, with this package's experts and with eager ones."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from flashmoe.integrations.transformers.experts import NAME
from shipped import loaded, windows

STEPS = 100
TOKENS = 64


def losses_with(implementation: str) -> list[float]:
    """The loss of each step, in float32, which includes an auxiliary loss of the router."""
    model = loaded(dtype=torch.float32).train()
    model.set_experts_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    passage, generator = torch.cat(windows()), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        first = int(torch.randint(len(passage) - TOKENS, (), generator=generator))
        ids = passage[None, first : first + TOKENS]
        loss = model(ids, labels=ids, output_router_logits=True, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("one_thread")
def test_losses_are_those_of_eager_experts():
    """At every tenth step, the losses differ by at most 1e-3, and they fall. (From random weights, they would differ
    sooner: the two kinds of experts add in different orders, and such small differences flip choices of the router.)"""
    ours, eager = losses_with(NAME), losses_with("eager")
    assert max(abs(a - b) for a, b in zip(ours[::10], eager[::10], strict=True)) <= 1e-3
    assert sum(ours[-20:]) < 0.8 * sum(ours[:20])
