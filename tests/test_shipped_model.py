"""The trained model that the package ships, on the CPU engine: it writes the text that it writes with eager experts,
and has about the same perplexity."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import flashmoe
import numpy as np
import pytest
import torch
from flashmoe.checkpoint import shipped_layer

pytest.importorskip("transformers")

from flashmoe.integrations.transformers import fuse, load_parallel
from flashmoe.integrations.transformers.experts import NAME, experts_modules
from shipped import ALIKE, FOLDER, PROMPTS, loaded, losses_of, perplexity, text_of, windows
from test_transformers_parallel import LOAD, on_ranks  # noqa: F401

ROOM = LOAD | {"max_tokens": 512}


def _write(rank, ranks):
    """The text that a rank writes from its own prompt, and the text that the whole model with eager experts writes from
    the same prompt."""
    expected = text_of(loaded(dtype=torch.float32, experts_implementation="eager"), PROMPTS[rank])
    model = load_parallel(FOLDER, dtype=torch.float32, **ROOM)
    return text_of(model, PROMPTS[rank], synced_gpus=True), expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_writes_what_eager_experts_write(on_ranks, ranks):  # noqa: F811
    texts = on_ranks(ranks, _write)
    for text, expected in texts:
        assert text == expected
        assert len(set(text.split())) > 20  # a text, not one word again and again
    assert len({text for text, _ in texts}) == ranks


def test_a_process_alone_writes_the_same(one_thread):
    model = loaded(dtype=torch.float32, experts_implementation="eager")
    expected = text_of(model, PROMPTS[0])
    model.set_experts_implementation(NAME)
    assert text_of(model, PROMPTS[0]) == expected
    assert text_of(fuse(model), PROMPTS[0]) == expected


def test_its_tokenizer_is_complete():
    """Decoding gives back any text. The tokens that end and pad texts are in the vocabulary, and padded batches can be
    continued and trained on."""
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    model = loaded(dtype=torch.float32, experts_implementation="eager")
    assert len(tokenizer) == model.config.vocab_size == 1024
    for text in (PROMPTS[0], "naïve – ÿþ 東京 🙂\n\ttabs  and spaces"):
        ids = tokenizer(text).input_ids
        assert max(ids) < 1024 and not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
        assert tokenizer.decode(ids) == text
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer("It was.<|endoftext|>").input_ids[-1] == tokenizer.eos_token_id < 1024

    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left")
    written = model.generate(**batch, max_new_tokens=5, do_sample=False)
    alone = tokenizer(PROMPTS[0], return_tensors="pt")
    expected = tokenizer.decode(model.generate(**alone, max_new_tokens=5, do_sample=False)[0])
    assert tokenizer.decode(written[0], skip_special_tokens=True) == expected != PROMPTS[0]

    examples = [tokenizer(text + tokenizer.eos_token) for text in PROMPTS]
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)(examples)
    assert (padded["labels"] == -100).any() and torch.isfinite(model(**padded).loss)


@pytest.fixture(scope="module")
def eager():
    model = loaded(dtype=torch.bfloat16, experts_implementation="eager")
    return model, perplexity(losses_of(model, windows()))


def _read(rank, ranks):
    return losses_of(load_parallel(FOLDER, dtype=torch.bfloat16, **ROOM), windows()[rank::ranks])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_foretells_a_passage_as_well_as_eager_experts(on_ranks, eager, ranks):  # noqa: F811
    _, expected = eager
    assert 15.0 < expected < 25.0  # the model's README.md says 18.7 for the whole test text
    assert perplexity(sum(on_ranks(ranks, _read))) == pytest.approx(expected, rel=ALIKE)


def test_a_lost_expert_would_be_noticed(eager):
    model, expected = eager
    without = copy.deepcopy(model)
    without.set_experts_implementation(NAME)
    with torch.no_grad():
        experts_modules(without)[0].down_proj[7].zero_()
    assert perplexity(losses_of(without, windows())) > expected * (1.0 + 5.0 * ALIKE)


def test_the_routing_of_the_passage_can_be_drawn(tmp_path):
    """examples/routing_map.py draws the routing, and prints how many tokens each layer's experts get. For layer 1,
    whose hidden states are shipped, a call of the layer must give the same numbers."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, str(root / "examples" / "routing_map.py"), str(tmp_path / "map.png")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    layer, states = shipped_layer()
    with flashmoe.Context(max_tokens=2048, hidden=256, intermediate=128, experts=16, top_k=4, dtype="bfloat16") as ctx:
        flashmoe.moe(ctx, states, **layer.tensors(), **layer.rule())
        load = np.bincount(ctx.last_call.topk_ids.ravel(), minlength=16)
    expected = f"busiest expert {load.argmax()} with {load.max()} of 2048 tokens, {load.max() / load.mean():.2f} times"
    assert f"layer 1: {expected} the mean; least busy {load.min()}" in said
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
