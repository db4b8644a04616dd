"""accelerate and Hugging Face's Trainer with FSDP2 on two ranks: the recipes of docs/TRAINERS.md compared with plain
runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks
from tests.trainers.recipes import furthest, needs, recipe

pytestmark = [
    needs("accelerate"),
    needs("transformers"),
    pytest.mark.timeout(600),  # six trainings in one launch, on a machine that may be busy
]

STEPS, MICRO, ROWS, LENGTH, VOCABULARY = 10, 2, 2, 8, 64


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (LENGTH,), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def shard_on_cpus() -> None:
    """Reset accelerate's state, and make it treat CPU ranks as GPUs, because it uses FSDP only on GPUs."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


HOW = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True, "cpu_ram_efficient_loading": False,
    "state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip


def with_accelerate(ours: bool, folder: Path, resume: bool, precision: str = "no") -> dict[str, Any]:
    """Train with accumulation, clipping and a checkpoint after half of the steps.

    resume: load that checkpoint and run only the second half.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **HOW)
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=MICRO, mixed_precision=precision
    )
    assert accelerator.is_fsdp2
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(samples(STEPS * MICRO * ROWS * 2), batch_size=ROWS)
    if ours:
        model, optimizer, loader = recipe("accelerate")["prepare"](accelerator, model, optimizer, loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(folder))
    losses, norms = [], []
    for number, batch in enumerate(loader):
        if resume and number < STEPS * MICRO // 2:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not resume and number == STEPS * MICRO // 2 - 1:
            accelerator.save_state(str(folder))
    return {"losses": losses, "norms": norms}


def with_trainer(ours: bool, folder: Path, resume: bool, precision: str = "no") -> dict[str, Any]:
    """Train with Hugging Face's Trainer, which changes the loss in place; `resume` as above."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS, gradient_accumulation_steps=MICRO,
        learning_rate=1e-3, logging_steps=1, save_steps=STEPS // 2, use_cpu=True, report_to=[], disable_tqdm=True,
        bf16=precision == "bf16", fsdp=True, dataloader_pin_memory=False,
        fsdp_config={"version": 2, **HOW},
    )  # fmt: skip
    shard_on_cpus()  # only now, because TrainingArguments resets the state itself
    callbacks = [recipe("Hugging Face Trainer")["Overlapc"]()] if ours else []
    trainer = Trainer(llama(), arguments, train_dataset=samples(STEPS * MICRO * ROWS * 2), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}") if resume else None)
    logs = [log for log in trainer.state.log_history if "loss" in log and (not resume or log["step"] > STEPS // 2)]
    return {"losses": [log["loss"] for log in logs], "norms": [log["grad_norm"] for log in logs]}


# Training function, mixed precision, and tolerance of losses and gradient norms against runs without overlapc.
CASES = {"accelerate": (with_accelerate, "bf16", 2e-2), "trainer": (with_trainer, "no", 1e-4)}


def work(folder: str) -> dict[str, Any]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found: dict[str, Any] = {}
    for name, (train, precision, _) in CASES.items():
        for ours, resume in ((False, False), (True, False), (True, True)):
            if not resume:  # else it may use the graphs of the run that it continues
                torch._dynamo.reset()
            before = counted("collectives")
            with contextlib.redirect_stdout(None):
                outcome = train(ours, Path(folder) / f"{name}-{ours}", resume, precision)
            found[f"{name}, {ours}, {resume}"] = {**outcome, "collectives": counted("collectives") - before}
    return found


def prepare() -> None:
    from transformers import LlamaForCausalLM, Trainer

    assert LlamaForCausalLM
    assert Trainer  # importing it also imports accelerate


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values_on_ranks(work, 2, str(tmp_path_factory.mktemp("runs")), timeout_s=580, prepare=prepare)


@pytest.mark.parametrize("trainer", CASES)
def test_ten_steps_match_the_trainer_without_overlapc(outcomes: list[dict[str, Any]], trainer: str):
    tolerance = CASES[trainer][2]
    for outcome in outcomes:
        theirs, ours = outcome[f"{trainer}, False, False"], outcome[f"{trainer}, True, False"]
        assert theirs["collectives"] == 0 < ours["collectives"]
        assert furthest(ours["losses"], theirs["losses"]) < tolerance
        assert furthest(ours["norms"], theirs["norms"]) < tolerance


@pytest.mark.parametrize("trainer", CASES)
def test_a_trainer_resumes_from_its_checkpoint(outcomes: list[dict[str, Any]], trainer: str):
    for outcome in outcomes:
        ours, resumed = outcome[f"{trainer}, True, False"], outcome[f"{trainer}, True, True"]
        for what in ("losses", "norms"):
            second_half = ours[what][len(ours[what]) // 2 :]
            assert len(second_half) > 2
            assert furthest(resumed[what], second_half) < 1e-5
