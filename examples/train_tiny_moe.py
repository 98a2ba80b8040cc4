"""Train the small Qwen3-MoE language model that FlashMoE ships, and export it.

    python examples/train_tiny_moe.py .corpus/austen.txt

`extract_corpus.py` makes the text file. The script needs torch, transformers, tokenizers and safetensors. It trains in
a few minutes on one GPU. With `--experts flashmoe`, it trains on the CPU, with this package's experts in float32.
(train_parallel.py trains a model whose experts are spread over processes.) The script writes the model in Hugging
Face's format (config.json, model.safetensors) and the tokenizer to --output. Beside that folder, it writes the hidden
states that reach one MoE layer while the model reads a passage of the test text. To --log, it writes the course of the
training.

The corpus is cut, in the file's order, into 90 % training, 5 % validation (which picks the best step) and 5 % test
text. Every loss and load in the log's "final" section is that of the model as written, in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashmoe.integrations.transformers  # noqa: F401
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

VOCABULARY = 1024
END, PAD = "<|endoftext|>", "<|pad|>"
NAMED = {"ÿ": END, "þ": PAD}
"""The entries of the vocabulary for the bytes 0xFF and 0xFE, which no UTF-8 text has, and the special tokens that they
become. The corpus has neither token, so the model does not learn when to end."""
PASSAGE_TOKENS = 2048
PASSAGE_LAYER = 1


@dataclass(frozen=True)
class Corpus:
    """Token ids, each int64 [N], of the three parts, and the number of UTF-8 bytes of the test part."""

    train: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor
    test_bytes: int


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="a UTF-8 text file")
    parser.add_argument("--output", type=Path, default=Path("python/flashmoe/assets/tiny-qwen3-moe"))
    parser.add_argument("--log", type=Path, default=Path("benchmarks/results/train_tiny_moe/h100x1.json"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=270.0, help="stop training after this long at most")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--context", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument(
        "--router-aux-loss",
        type=float,
        default=1e-4,
        help="load-balancing weight; small, so that the routing stays about as uneven as the text makes it",
    )
    parser.add_argument("--experts", choices=("eager", "flashmoe"), default="eager", help="what computes the experts")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps between validations")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_tokenizer(text: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `VOCABULARY` entries, `END` and `PAD` among them."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    trained = json.loads(tokenizer.to_str())
    vocabulary = trained["model"]["vocab"]
    trained["model"]["vocab"] = {NAMED.get(entry, entry): number for entry, number in vocabulary.items()}
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    tokenizer.add_special_tokens(list(NAMED.values()))
    return tokenizer


def split_text(text: str) -> tuple[str, str, str]:
    """Cut the text into 90 % training, 5 % validation and 5 % test, in its own order."""
    first, second = int(0.90 * len(text)), int(0.95 * len(text))
    return text[:first], text[first:second], text[second:]


def load_corpus(path: Path) -> tuple[Tokenizer, Corpus]:
    """Tokenize the file. The tokenizer is trained on the training part alone."""
    train, validation, test = split_text(path.read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(train)
    train_ids, validation_ids, test_ids = (
        torch.tensor(tokenizer.encode(part).ids) for part in (train, validation, test)
    )
    return tokenizer, Corpus(train_ids, validation_ids, test_ids, len(test.encode()))


def build_model(context: int, router_aux_loss: float, experts: str) -> Qwen3MoeForCausalLM:
    """Two Qwen3-MoE layers, both sparse: 16 experts, 4 per token, hidden 256, intermediate 128."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,  # of a dense layer: the model has none
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "max_position_embeddings": max(context, PASSAGE_TOKENS),
        "router_aux_loss_coef": router_aux_loss,
        "attn_implementation": "sdpa",
    }
    # "eager" experts, a plain loop over the experts, have gradients in float32 on every device; Transformers' fused
    # implementations do not.
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    model.set_experts_implementation(experts)
    return model


def random_windows(ids: torch.Tensor, batch: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Sample `batch` windows from the stream `ids` [N]; int64 [batch, context]."""
    starts = torch.randint(len(ids) - context + 1, (batch, 1), generator=generator)
    return ids[starts + torch.arange(context)]


@torch.no_grad()
def mean_loss(model: Qwen3MoeForCausalLM, ids: torch.Tensor, context: int) -> float:
    """Mean next-token loss, in nats, over `ids` [N] read in consecutive windows of `context` tokens."""
    device, was_training = model.device, model.training
    model.train(False)
    total, count = 0.0, 0
    for window in torch.split(ids, context):
        if len(window) < 2:
            continue
        window = window.to(device)
        logits = model(window[None], use_cache=False).logits[0, :-1].float()
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    model.train(was_training)
    return total / count


def unigram_loss(train: torch.Tensor, test: torch.Tensor) -> float:
    """Loss, in nats per token, of the training part's token frequencies (add-one smoothed) on `test`."""
    counts = torch.bincount(train, minlength=VOCABULARY) + 1
    return -(counts / counts.sum()).log()[test].mean().item()


def learning_rate_factor(step: int, steps: int, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(model: Qwen3MoeForCausalLM, corpus: Corpus, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in place, leave the model at its best validation step, and return the history."""
    generator = torch.Generator().manual_seed(arguments.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, arguments.steps))
    history, best_loss, best_state = [], math.inf, model.state_dict()
    began = time.monotonic()
    model.train()
    for step in range(1, arguments.steps + 1):
        ids = random_windows(corpus.train, arguments.batch, arguments.context, generator).to(model.device)
        outputs = model(ids, labels=ids, output_router_logits=True, use_cache=False)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

        out_of_time = time.monotonic() - began > arguments.seconds
        if step % arguments.evaluate_every and step != arguments.steps and not out_of_time:
            continue
        validation_loss = mean_loss(model, corpus.validation, arguments.context)
        history.append(
            {
                "step": step,
                "seconds": round(time.monotonic() - began, 1),
                "train_loss": round(outputs.loss.item(), 4),
                "validation_loss": round(validation_loss, 4),
            }
        )
        print(history[-1], flush=True)
        if validation_loss < best_loss:
            best_loss, best_state = validation_loss, copy.deepcopy(model.state_dict())
        if out_of_time:
            break
    model.load_state_dict(best_state)
    return history


def blocks_of(model: Qwen3MoeForCausalLM) -> list[Qwen3MoeSparseMoeBlock]:
    """Each layer's MoE block."""
    return [block for block in model.modules() if isinstance(block, Qwen3MoeSparseMoeBlock)]


@torch.no_grad()
def moe_inputs(model: Qwen3MoeForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """The hidden states that reach each layer's MoE block while the model reads `ids` [T]: [T, hidden] per layer."""
    captured: list[torch.Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0][0].clone()))
        for block in blocks_of(model)
    ]
    model(ids[None].to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return captured


def expert_load(model: Qwen3MoeForCausalLM, layer: int, hidden_states: torch.Tensor) -> list[int]:
    """How many of the tokens `hidden_states` [T, hidden] each expert of the layer gets."""
    logits = hidden_states.float() @ blocks_of(model)[layer].gate.weight.float().T
    chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=model.config.num_experts).tolist()


def export(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, passage: torch.Tensor, output: Path) -> dict[str, Any]:
    """Write the model in bfloat16, the tokenizer, and beside them layer `PASSAGE_LAYER`'s input for the passage.

    `passage` is int64 [PASSAGE_TOKENS]. Returns the model as read back, each layer's `expert_load` for the
    passage, and the file sizes.
    """
    output.mkdir(parents=True, exist_ok=True)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    model.bfloat16().save_pretrained(output)
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": model.config.max_position_embeddings,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    shipped = Qwen3MoeForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    shipped.to(model.device)  # type: ignore[arg-type]  # Transformers' wrapper hides what it takes
    inputs = moe_inputs(shipped, passage)
    hidden_states = output.with_name(f"{output.name}-hidden-states.safetensors")  # loaders take all in `output`
    save_file(
        {
            "hidden_states": inputs[PASSAGE_LAYER].cpu().contiguous(),
            "token_ids": passage.to(torch.int32),
        },
        hidden_states,
        metadata={"layer": str(PASSAGE_LAYER)},
    )
    files = (output / "config.json", output / "model.safetensors", output / "tokenizer.json", hidden_states)
    return {
        "model": shipped,
        "expert_load": [expert_load(shipped, i, states) for i, states in enumerate(inputs)],
        "bytes": {file.name: file.stat().st_size for file in files},
    }


def head() -> str:
    """The commit that is checked out; empty if git cannot tell it."""
    command, folder = ["git", "rev-parse", "HEAD"], Path(__file__).resolve().parent
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> None:
    """Train, export, measure what was exported, and write the log."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    on_gpu = torch.cuda.is_available() and arguments.experts == "eager"
    device = torch.device("cuda" if on_gpu else "cpu")

    tokenizer, corpus = load_corpus(arguments.corpus)
    if len(corpus.test) < PASSAGE_TOKENS:
        raise SystemExit(f"corpus: expected at least {PASSAGE_TOKENS} test tokens, got {len(corpus.test)}")
    tokens = {part: len(getattr(corpus, part)) for part in ("train", "validation", "test")}
    print("tokens:", tokens, flush=True)

    model = build_model(arguments.context, arguments.router_aux_loss, arguments.experts)
    model.to(device)  # type: ignore[arg-type]  # Transformers' wrapper hides what it takes
    parameters = sum(parameter.numel() for parameter in model.parameters())
    began = time.monotonic()
    history = train(model, corpus, arguments)
    seconds = time.monotonic() - began

    passage = corpus.test[:PASSAGE_TOKENS]
    exported = export(model, tokenizer, passage, arguments.output)
    shipped = exported["model"]
    test_loss = mean_loss(shipped, corpus.test, arguments.context)
    log = {
        "commit": head(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
        "settings": {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)},
        "parameters": parameters,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "history": history,
        "final": {
            "best_step": min(history, key=lambda entry: entry["validation_loss"])["step"],
            "validation_loss": round(mean_loss(shipped, corpus.validation, arguments.context), 4),
            "test_loss": round(test_loss, 4),
            "test_perplexity": round(math.exp(test_loss), 2),
            "test_bits_per_byte": round(test_loss / math.log(2) * len(corpus.test) / corpus.test_bytes, 3),
            "unigram_test_loss": round(unigram_loss(corpus.train, corpus.test), 4),
            "unigram_test_perplexity": round(math.exp(unigram_loss(corpus.train, corpus.test)), 2),
            "passage_expert_load": exported["expert_load"],
            "passage_max_over_mean_load": [
                round(max(load) * len(load) / sum(load), 3) for load in exported["expert_load"]
            ],
            "bytes": exported["bytes"],
        },
    }
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    arguments.log.write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(log["final"], indent=2))


if __name__ == "__main__":
    main()
