"""Draw which experts the shipped model's routers choose for a passage that it was not trained on.

    python examples/routing_map.py docs/images/routing.png

Needs Transformers. The model reads the 2048 tokens of the passage at once. The left pictures show the combine weights
of the first tokens, a column for each; the right ones show how many of all tokens each expert gets.
"""

import sys
from importlib import resources
from typing import Any

import flashmoe.integrations.transformers  # noqa: F401
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

SHOWN = 64
COLOUR = "#1f5fa8"


def routed(model: Qwen3MoeForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """For each layer the weights [T, E] of the experts that its router chooses, and 0 for all other experts."""
    weights: list[torch.Tensor] = []

    def note(router: torch.nn.Module, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        logits, chosen, index = outputs
        weights.append(torch.zeros_like(logits, dtype=torch.float32).scatter(1, index, chosen.float()))

    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(ids[None])
    return weights


def draw(path: str, weights: list[torch.Tensor], words: list[str]) -> None:
    """Draws a row for each layer: the weights of the first tokens, whose texts are `words`, and how many of all tokens
    each expert gets."""
    grid = {"width_ratios": [6, 1], "wspace": 0.03, "hspace": 0.12}
    figure, rows = plt.subplots(
        len(weights), 2, squeeze=False, sharex="col", gridspec_kw=grid, figsize=(12, 5.6), dpi=110
    )
    tokens, experts = weights[0].shape
    for layer, ((left, right), of_layer) in enumerate(zip(rows, weights, strict=True)):
        left.imshow(of_layer[:SHOWN].T, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", origin="lower")
        left.set_ylabel(f"layer {layer}: expert")
        left.set_yticks(range(0, experts, 5))
        left.set_xticks(range(SHOWN), words, rotation=90, fontsize=7)
        load = (of_layer > 0.0).sum(dim=0)
        right.barh(range(experts), load, color=COLOUR, height=0.8)
        right.axvline(load.float().mean(), color="0.4", linewidth=1, linestyle=":")
        right.set_ylim(-0.5, experts - 0.5)
        right.set_yticks([])
        right.spines[["top", "right", "left"]].set_visible(False)
        print(
            f"layer {layer}: busiest expert {int(load.argmax())} with {int(load.max())} of {tokens} tokens, "
            f"{load.max() / load.float().mean():.2f} times the mean; least busy {int(load.min())}"
        )
    left, right = rows[-1]
    right.set_xlabel(f"tokens of {tokens}\n(dotted: mean)")
    left.set_xlabel("first tokens of the passage (_ is a space)")
    bar = figure.colorbar(left.images[0], ax=rows, location="right", fraction=0.02, pad=0.015)
    bar.set_label("weight")
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    (path,) = sys.argv[1:]
    with resources.as_file(resources.files("flashmoe") / "assets") as assets:
        folder = assets / "tiny-qwen3-moe"
        model = Qwen3MoeForCausalLM.from_pretrained(folder, experts_implementation="flashmoe")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        with safe_open(assets / "tiny-qwen3-moe-hidden-states.safetensors", "pt") as file:
            ids = file.get_tensor("token_ids").long()
    words = [str(tokenizer.decode(each)).replace(" ", "_").replace("\n", "\\n") for each in ids[:SHOWN, None]]
    draw(path, routed(model, ids), words)


if __name__ == "__main__":
    main()
