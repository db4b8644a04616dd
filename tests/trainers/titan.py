"""torchtitan on CPU ranks over gloo: a small Llama, random tokens, and the device module that torchtitan needs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

VOCABULARY, LENGTH, ROWS = 64, 16, 2


@functools.cache
def on_cpus() -> None:
    """Import torchtitan with a fake device module, because it takes its device from torch and does not know the CPU."""
    names = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
    device: Any = SimpleNamespace(**dict.fromkeys(names, lambda *args: None))
    device.device_count = lambda: 1
    device.current_device = lambda: 0
    device.get_device_name = lambda *args: "CPU"
    device.get_device_properties = lambda *args: SimpleNamespace(total_memory=1 << 30)
    device.memory_stats = lambda *args: {}
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=device),
    ):
        import torchtitan.tools.utils
    import torchtitan.trainer

    torchtitan.trainer.dist_utils.set_pg_timeouts = lambda *args, **kwargs: None  # its barrier does not exist in gloo


def configured(folder: str, *, resume: bool = False, steps: int = 10, accumulate: int = 1, **parallelism: Any) -> Any:
    """Return a Trainer.Config of a model of two layers with selective checkpointing, chunked loss, bf16, and a
    checkpoint after half of `steps`.

    resume: continue from that checkpoint. accumulate: micro-batches per step.
    """
    on_cpus()
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import (
        _EMBEDDING_INIT,
        _NORM_INIT,
        Llama3Model,
        _build_llama3_layers,
        _output_linear_init,
        model_registry,
        parallelize_llama,
    )
    from torchtitan.trainer import Trainer

    def parallelize(model: nn.Module, **how: Any) -> nn.Module:
        model = parallelize_llama(model, **how)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo supports no averages or premultiplied sums
        return model

    dim, heads = 32, 4
    spec = model_registry("debugmodel")
    spec.parallelize_fn = parallelize
    layers = _build_llama3_layers(
        n_layers=2, dim=dim, n_heads=heads, n_kv_heads=2, hidden_dim=64, attn_backend="flex",
        rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=LENGTH, theta=500000),
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others have no eager CPU kernel
    spec.model = Llama3Model.Config(
        dim=dim, vocab_size=VOCABULARY, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=dim, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=VOCABULARY, param_init=_output_linear_init(dim)),
    )  # fmt: skip

    class Words(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **kwargs: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class RandomTokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, **kwargs: Any) -> None:
            self.rank, self.given = dp_rank, 0

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                generator = torch.Generator().manual_seed(1000 * self.given + self.rank)
                self.given += 1
                tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.given = state["given"]

    replicas = parallelism.get("tensor_parallel_degree", 1)
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
        tokenizer=Words.Config(),
        dataloader=RandomTokens.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=ROWS, global_batch_size=ROWS * accumulate * dist.get_world_size() // replicas,
            seq_len=LENGTH, steps=steps, disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor", **parallelism}),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=steps // 2, last_save_model_only=False, load_step=steps // 2 if resume else -1,
        ),
        activation_checkpoint=SelectiveAC.Config(),
    )  # fmt: skip


def traced(config: Any, pipeline: str) -> Any:
    """Return `config` for torchtitan's graph_trainer, with the pass pipeline `pipeline`, or no passes if it is ""."""
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig, to_graph_trainer_config
    from torchtitan.experiments.graph_trainer.llama3 import model_registry

    made = to_graph_trainer_config(config, model_registry)
    made.compile = GraphTrainerCompileConfig(enable=True, enable_passes=bool(pipeline), pass_pipeline=pipeline)
    return made


def train(config: Any) -> list[tuple[float, float]]:
    """Train and return the (loss, gradient norm) that torchtitan logs for each step."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    logged: list[tuple[float, float]] = []
    trainer = config.build()
    log: Callable[..., None] = lambda step, mean, largest, norm, **extra: logged.append((mean, norm))  # noqa: E731
    with mock.patch.object(trainer.metrics_processor, "log", log), mock.patch("torchtitan.trainer.time.sleep"):
        trainer.train()
    trainer.close()
    return logged
