"""Record tiny checkpoints by the real libraries that are too big for the test environment: on CPU, one process, no GPU.

    pip install torch==2.13.0 transformers==5.24.0 accelerate lightning==2.6.6 orbax-checkpoint==0.12.8 \
        megatron-core==0.16.1 deepspeed==0.19.8
    python tests/recordings/record_checkpoints.py            # every library, half a minute each
    python tests/recordings/record_checkpoints.py orbax

Writes tests/recordings/checkpoints/LIBRARY/. Checkpoints of torch itself are made by the tests; transformers
writes safetensors.
The folders of Megatron-LM's legacy form are named as `get_checkpoint_name` of megatron/training/checkpointing.py names them;
the files in them are torch.save's, as there (that part of Megatron-LM is on no index).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent / "checkpoints"
MADE = Path("/tmp/recorded-checkpoints")  # several libraries write the path into the checkpoint
os.environ |= {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29555", "DS_ACCELERATOR": "cpu", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


def transformers(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = torch.arange(4) % 16
            return {"input_ids": row, "labels": row}

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    options = TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        logging_steps=2, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=options, train_dataset=Rows()).train()
    model.save_pretrained(folder / "sharded", max_shard_size="1KB")


def lightning(folder: Path) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Line(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1, save_last="link")
    trainer = L.Trainer(
        max_steps=4, accelerator="cpu", callbacks=[keep], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Line(), loader)


def orbax(folder: Path) -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3)) as manager:
        for step in (10, 20):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones((2, 2)), "step": step}))
        manager.wait_until_finished()


def megatron(folder: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    torch.cuda.synchronize, torch.cuda.current_device = (lambda: None), (lambda: "cpu")  # called also without a GPU
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    for step in (100, 200):
        there = folder / "torch_dist" / f"iter_{step:07d}"
        there.mkdir(parents=True)
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4, 4)), "iteration": step, "args": {"tp": 1}}
        dist_checkpointing.save(state, str(there))
    (folder / "torch_dist" / "latest_checkpointed_iteration.txt").write_text("200")
    for rank in ("mp_rank_00", "mp_rank_01"):  # two tensor-parallel ranks
        there = folder / "legacy" / "iter_0000100" / rank
        there.mkdir(parents=True)
        torch.save({"iteration": 100, "model": {"w": torch.ones(4)}}, there / "model_optim_rng.pt")
    (folder / "legacy" / "latest_checkpointed_iteration.txt").write_text("100")


def deepspeed(folder: Path) -> None:
    import deepspeed as ds
    import torch

    model = torch.nn.Linear(4, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    engine, *_ = ds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    for step in (1, 2):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
        engine.step()
        engine.save_checkpoint(str(folder), tag=f"global_step{step}")


LIBRARIES = {
    "transformers": transformers,
    "lightning": lightning,
    "orbax": orbax,
    "megatron": megatron,
    "deepspeed": deepspeed,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        LIBRARIES[sys.argv[2]](MADE / sys.argv[2])
    else:
        for name in sys.argv[1:] or LIBRARIES:
            shutil.rmtree(MADE, ignore_errors=True)
            (MADE / name).mkdir(parents=True)
            subprocess.run([sys.executable, __file__, "--one", name], check=True)
            for script in MADE.rglob("*.py"):  # DeepSpeed puts its converters beside the checkpoints
                script.unlink()
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(MADE / name, HERE / name, symlinks=True)
