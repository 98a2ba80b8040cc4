"""The trained model that the package ships, on the CPU engine: the text and the perplexity of eager experts."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from flashmoe.integrations.transformers import fuse, load_parallel
from flashmoe.integrations.transformers.experts import NAME, experts_modules
from shipped import ALIKE, FOLDER, PROMPTS, loaded, losses_of, perplexity, text_of, windows
from test_transformers_parallel import LOAD, on_ranks, pool  # noqa: F401

ROOM = LOAD | {"max_tokens": 512}


def _write(rank, ranks):
    """What a rank writes from its own prompt, and what the whole model writes with eager experts."""
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


@pytest.fixture
def one_thread():
    """Of PyTorch: its threads and the engine's wait for one another where there are fewer cores than both."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_process_alone_writes_the_same(one_thread):
    model = loaded(dtype=torch.float32, experts_implementation="eager")
    expected = text_of(model, PROMPTS[0])
    model.set_experts_implementation(NAME)
    assert text_of(model, PROMPTS[0]) == expected
    assert text_of(fuse(model), PROMPTS[0]) == expected


@pytest.fixture(scope="module")
def eager():
    model = loaded(dtype=torch.bfloat16, experts_implementation="eager")
    return model, perplexity(losses_of(model, windows()))


def _read(rank, ranks):
    return losses_of(load_parallel(FOLDER, dtype=torch.bfloat16, **ROOM), windows()[rank::ranks])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_foretells_a_passage_as_well_as_eager_experts(on_ranks, eager, ranks):  # noqa: F811
    _, expected = eager
    assert 15.0 < expected < 25.0  # as its README.md says of the whole text
    assert perplexity(sum(on_ranks(ranks, _read))) == pytest.approx(expected, rel=ALIKE)


def test_a_lost_expert_would_be_noticed(eager):
    model, expected = eager
    without = copy.deepcopy(model)
    without.set_experts_implementation(NAME)
    with torch.no_grad():
        experts_modules(without)[0].down_proj[7].zero_()
    assert perplexity(losses_of(without, windows())) > expected * (1.0 + 5.0 * ALIKE)
