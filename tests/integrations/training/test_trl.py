"""TRL's trainers with their defaults, on CPUs: losses and parameters are those of eager experts, except for noise.

The tests set only sizes, steps, paths, outputs and the experts' implementation. So, by the defaults, training is in
bfloat16 by autocast, blocks are computed again in the backward pass (`gradient_checkpointing`), and DPO and GRPO have
learning rates of 1e-6.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch

trl = pytest.importorskip("trl", reason="there is no TRL: see `make test-integrations`")

import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from loss_noise import Run, check_within_noise, parameters_of, run_of  # noqa: E402
from tiny_moe import tiny_moe  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 30
BATCH = 8
SENTENCES = [f"{subject} {verb} {what}." for subject in ("She", "He") for verb in ("saw", "had") for what in "abcdefgh"]


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte and two special tokens: token 0 pads, and token 1 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def height(completions: list[str], **_: Any) -> list[float]:
    """A reward: the sum of a completion's code points."""
    return [float(sum(map(ord, text))) for text in completions]


def preferences() -> Dataset:
    pairs = zip(SENTENCES, reversed(SENTENCES), strict=True)
    return Dataset.from_list([{"prompt": "Well: ", "chosen": one, "rejected": other} for one, other in pairs])


TRAINERS = {
    "SFT": lambda: (trl.SFTTrainer, trl.SFTConfig, Dataset.from_dict({"text": SENTENCES}), {}, {}),
    "DPO": lambda: (trl.DPOTrainer, trl.DPOConfig, preferences(), {}, {}),
    "GRPO": lambda: (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        Dataset.from_dict({"prompt": SENTENCES}),
        # With completions of 4 tokens, few tokens are sampled differently in 16-bit types than in float32. With 12
        # tokens, so many are that these differences hide all others.
        {"max_completion_length": 4},
        {"reward_funcs": height},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint in float32 with its tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    tiny_moe("eager", len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def trained(folder: Path, output: Path, name: str, experts: str, **options: Any) -> Run:
    trainer_class, config_class, data, sizes, more = TRAINERS[name]()
    arguments = config_class(
        output_dir=str(output),
        model_init_kwargs={"experts_implementation": experts},
        use_cpu=True,
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **sizes,
        **options,
    )
    trainer = trainer_class(
        model=str(folder), args=arguments, train_dataset=data, processing_class=byte_tokenizer(), **more
    )
    assert trainer.model.config._experts_implementation == experts and trainer.model.dtype == torch.float32
    before = parameters_of(trainer.model)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return run_of(losses, before, parameters_of(trainer.model))


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_with_its_defaults(folder: Path, name: str, tmp_path: Path):
    exact = trained(folder, tmp_path / "exact", name, "eager", bf16=False)
    eager = trained(folder, tmp_path / "eager", name, "eager")
    check_within_noise(trained(folder, tmp_path / "ours", name, "flashmoe"), eager, exact)
