"""torchtitan's own trainer with its debug model over a plan, on processors; run by torchrun.

    titan.py FOLDER STEPS [--validate]

Writes the tokens of every micro-batch that the trainer took, as one line per rank: step, rank, rows.

torchtitan 0.3.0 wants an accelerator, and FlexAttention has no backward pass without one. So `torch.cpu` gets what the
trainer asks of `torch.cuda`, attention is computed densely with the mask that torchtitan made, and where torch is
older than 2.14 it gets `set_timeout` under its former name. Nothing else differs.
"""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import AuxOutput, create_mask

torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=1 << 34, name="cpu"),
    "current_device": lambda: 0,
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
}.items():
    setattr(torch.cpu, name, value)
_barrier = torch.distributed.barrier
torch.distributed.barrier = lambda group=None, async_op=False, device_ids=None: _barrier(group, async_op)
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from penstock.integrations.torchtitan import PlanDataLoader  # noqa: E402


def dense(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, AuxOutput]:
    """What FlexAttention computes."""
    visible = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    attended = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
    )
    return attended, AuxOutput(None, None)


FlexAttention._compiled_flex_attn = dense


def note_batches(trainer: Trainer, folder: Path) -> None:
    """Write what each step takes to `rank<r>.jsonl`, before it is computed."""
    batches, rank = trainer.batch_generator, torch.distributed.get_rank()

    def noted(loader: Any) -> Any:
        with (folder / f"rank{rank}.jsonl").open("a", buffering=1) as file:
            for inputs, labels in batches(loader):
                file.write(json.dumps([trainer.step, inputs["input"].tolist()]) + "\n")
                yield inputs, labels

    trainer.batch_generator = noted


def main() -> None:
    """Train up to a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args()
    init_logger()
    config = llama3_debugmodel()
    config.dataloader = PlanDataLoader.Config(plan=str(arguments.folder / "train.toml"))
    config.hf_assets_path, config.dump_folder = str(arguments.folder / "tokenizer"), str(arguments.folder)
    training = config.training
    training.steps, training.seq_len = arguments.steps, arguments.length
    training.local_batch_size, training.global_batch_size = 2, 8
    training.disable_cuda_graphs = True
    config.checkpoint.enable, config.checkpoint.interval = True, 1
    config.parallelism.context_parallel_degree = arguments.context
    config.parallelism.spmd_backend = "partial_dtensor"  # fully_shard of torch 2.13 does not know the default
    config.validator.enable, config.validator.steps, config.validator.freq = arguments.validate, -1, 2
    config.validator.dataloader = PlanDataLoader.Config(plan=str(arguments.folder / "validation.toml"))
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other that FSDP asks for
    note_batches(trainer, arguments.folder)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
