"""Trainers in 16-bit types: losses and parameters differ from those of eager experts by no more than noise."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate", reason="Transformers' Trainer needs the package accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from flashmoe.integrations.transformers import fuse  # noqa: E402
from loss_noise import Run, check_within_noise, parameters_of, run_of  # noqa: E402
from tiny_moe import tiny_moe  # noqa: E402

STEPS = 30


def examples() -> list[dict[str, torch.Tensor]]:
    ids = (torch.arange(16)[None] * torch.arange(1, 33)[:, None]) % 53 + 1
    return [{"input_ids": each, "labels": each} for each in ids]


def trained(folder: Path, model: torch.nn.Module, bf16: bool = True) -> Run:
    """Trains the model with a Trainer that has its default optimizer and schedule."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=bf16,
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples())
    before = parameters_of(model)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return run_of(losses, before, parameters_of(model))


@pytest.mark.parametrize("patch", [lambda model: model, fuse], ids=["experts", "whole blocks"])
def test_a_trainer_in_bfloat16(tmp_path: Path, patch: Callable[[torch.nn.Module], torch.nn.Module]):
    exact = trained(tmp_path / "exact", tiny_moe("eager"), bf16=False)
    eager = trained(tmp_path / "eager", tiny_moe("eager"))
    check_within_noise(trained(tmp_path / "ours", patch(tiny_moe("flashmoe"))), eager, exact)


def accelerated(implementation: str, precision: str, with_scaler: bool = False) -> Run:
    """Trains with Accelerate's `prepare` and `backward`. On CPUs, Accelerate ignores ``"fp16"`` and computes in
    float32. `with_scaler` adds what Accelerate adds on GPUs: autocast to float16, and a scaler of the loss."""
    AcceleratorState._reset_state(True)
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        if with_scaler:
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
        model = tiny_moe(implementation)
        before = parameters_of(model)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        batch = {name: torch.stack([each[name] for each in examples()]) for name in ("input_ids", "labels")}
        losses = []
        for _ in range(STEPS):
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            assert not optimizer.step_was_skipped
            optimizer.zero_grad()
            losses.append(loss.item())
        return run_of(losses, before, parameters_of(model))
    finally:
        AcceleratorState._reset_state(True)


@pytest.mark.parametrize(("precision", "with_scaler"), [("bf16", False), ("fp16", True)])
def test_accelerate(precision: str, with_scaler: bool):
    exact, eager, ours = (
        accelerated("eager", "no"),
        accelerated("eager", precision, with_scaler),
        accelerated("flashmoe", precision, with_scaler),
    )
    assert exact.losses[-1] < 0.9 * exact.losses[0]
    check_within_noise(ours, eager, exact)


def test_accelerate_in_float16_on_cpus_is_float32():
    assert accelerated("flashmoe", "fp16").losses == accelerated("flashmoe", "no").losses
