"""Why the curves of training_curves.py differ: trains the shipped model twice, with eager experts and with this
package's, in one process on the same windows, and compares what the two models' routers choose.

    python benchmarks/routing_flips.py [--steps 200] [--out FILE.json]

Needs Transformers and safetensors; on two cores it takes a minute and a half. A flip is a token for which the same
layer of the two models chooses different experts. It happens where the logits of the last expert that is chosen and of
the first that is not lie so close together that earlier rounding decides between the two. For each step with flips, the
loss is computed once more, with eager experts, the weights of the eager model and the choices of the other model. If
the flips alone make the losses differ, this loss is the same as that of the other model.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import torch
from flashmoe.bench.origin import commit_option, cpu_model, result_path, write
from harness import described_on_cpu
from training_curves import BATCH, WINDOW, assets, passage

Routed = tuple[torch.Tensor, ...]
"""The results of a layer's router: logits [T, E], combine weights [T, K] and ids [T, K]."""


class Trained:
    """A model, its optimizer, and its routers' results in the last forward pass, by layer."""

    def __init__(self, experts: str) -> None:
        import flashmoe.integrations.transformers  # noqa: F401
        from transformers import AutoModelForCausalLM

        load = {"dtype": torch.float32, "experts_implementation": experts, "local_files_only": True}
        self.model = AutoModelForCausalLM.from_pretrained(assets() / "tiny-qwen3-moe", **load).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95))
        self.routed: list[Routed] = []
        self._routers = [layer.mlp.gate for layer in self.model.model.layers]
        for router in self._routers:
            router.register_forward_hook(
                lambda *of_call: self.routed.append(tuple(each.detach() for each in of_call[2]))
            )

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        self.routed.clear()
        return self.model(input_ids=windows, labels=windows, use_cache=False).loss

    def loss_with(self, windows: torch.Tensor, routed: list[Routed]) -> float:
        """The loss if the model's routers return the results `routed` of another model's routers."""
        hooks = [
            router.register_forward_hook(lambda *_, of_layer=of_layer: of_layer)
            for router, of_layer in zip(self._routers, routed, strict=True)
        ]
        with torch.no_grad():
            loss = self.loss(windows).item()
        for hook in hooks:
            hook.remove()
        return loss

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def flips(ours: torch.Tensor, theirs: torch.Tensor, top_k: int) -> list[dict[str, Any]]:
    """The flips between two models' logits [T, E]: the tokens whose first `top_k` experts differ. For each: the experts
    that only one model chooses, for both models, and for both the logit of the last expert that is chosen less that of
    the first that is not."""
    found = []
    ranked = [each.topk(top_k + 1, -1) for each in (ours, theirs)]
    chosen = [[{*row} for row in each.indices[:, :top_k].tolist()] for each in ranked]
    for token, (mine, other) in enumerate(zip(*chosen, strict=True)):
        if mine != other:
            gaps = [float(each.values[token, top_k - 1] - each.values[token, top_k]) for each in ranked]
            found.append({"token": token, "experts": [sorted(mine - other), sorted(other - mine)], "gaps": gaps})
    return found


def apart(ones: list[torch.Tensor], others: list[torch.Tensor]) -> list[float]:
    """The largest difference between the elements of each pair of tensors."""
    return [(one - other).abs().max().item() for one, other in zip(ones, others, strict=True)]


def compare(eager: Trained, ours: Trained, windows: torch.Tensor) -> dict[str, Any]:
    """Makes one step with both models. Returns how far they are apart, and their flips."""
    losses = eager.loss(windows), ours.loss(windows)
    theirs, mine = list(eager.routed), list(ours.routed)
    found = [
        {"layer": layer, **flip}
        for layer, (one, other) in enumerate(zip(theirs, mine, strict=True))
        for flip in flips(one[0], other[0], one[-1].shape[-1])
    ]
    row: dict[str, Any] = {
        "loss": losses[0].item(),
        "apart": losses[1].item() - losses[0].item(),
        "logits_apart": max(apart([one[0] for one in theirs], [other[0] for other in mine])),
        "flips": found,
    }
    if found:
        row["apart_with_the_same_choices"] = losses[1].item() - eager.loss_with(windows, mine)
    for model, loss in zip((eager, ours), losses, strict=True):
        model.step(loss)
    row["weights_apart"] = max(apart(list(eager.model.parameters()), list(ours.model.parameters())))
    return row


def batches(steps: int) -> list[torch.Tensor]:
    """The batches of all steps, drawn as examples/train_parallel.py draws them from the same text."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(assets() / "tiny-qwen3-moe" / "tokenizer.json"))
    ids = torch.tensor(tokenizer(passage()).input_ids)
    generator = torch.Generator().manual_seed(1)
    first = [torch.randint(len(ids) - WINDOW, (BATCH, 1), generator=generator) for _ in range(steps)]
    return [ids[each + torch.arange(WINDOW)] for each in first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=pathlib.Path, default=result_path("routing_flips", cpu_model(), 0))
    commit_option(parser)
    args = parser.parse_args()

    import transformers

    torch.set_num_threads(1)  # as in training_curves.py: so sums of eager experts have the same bits there
    eager, ours = Trained("eager"), Trained("flashmoe")
    rows = []
    for step, windows in enumerate(batches(args.steps)):
        rows.append({"step": step, **compare(eager, ours, windows)})
        print(shown(rows[-1]), flush=True)
    result = {
        **described_on_cpu(args.commit),
        "transformers": transformers.__version__,
        "steps": args.steps,
        **{name: [row[name] for row in rows] for name in ("loss", "apart", "logits_apart", "weights_apart")},
        "flips": [
            {name: row[name] for name in ("step", "flips", "apart_with_the_same_choices")}
            for row in rows
            if row["flips"]
        ],
    }
    write(args.out, result)


def shown(row: dict[str, Any]) -> str:
    said = f"step {row['step']}: {row['loss']:.7f}, apart {row['apart']:+.1e}"
    said += f", logits {row['logits_apart']:.1e}, weights {row['weights_apart']:.1e}"
    for flip in row["flips"]:
        one, other = flip["experts"]
        said += f"\n    layer {flip['layer']}, token {flip['token']}: eager chooses {one} by {flip['gaps'][0]:.1e}, "
        said += f"flashmoe {other} by {flip['gaps'][1]:.1e}"
    if row["flips"]:
        said += f"\n    with the same choices apart {row['apart_with_the_same_choices']:+.1e}"
    return said


if __name__ == "__main__":
    main()
