"""transformers' Trainer over models that shardwise.hub has loaded; compared with one device.

accelerate allows tensor parallelism on accelerators only. Here it takes the CPU processes for such.
"""

import os
from functools import partial

import checks
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

from shardwise import hub, init_device_mesh

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
BATCH, STEPS, RATE, NORM = 8, 2, 1e-2, 0.5


def batches():
    torch.manual_seed(1)
    return torch.randint(1, 64, (STEPS * BATCH, 8))


def train_on_one_device(folder):
    """Return the losses and norms of gradients of each step, and the parameters after training."""
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-3, weight_decay=0.0)
    results = []
    for ids in batches().split(BATCH):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results, dict(model.named_parameters())


def train(plan, checkpointing, folder):
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder / "before")
    dist.barrier()
    expected, parameters = train_on_one_device(folder / "before")
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = hub.load(LlamaForCausalLM, folder / "before", mesh, plan)
    arguments = TrainingArguments(
        output_dir=folder / "out",
        per_device_train_batch_size=BATCH if plan == "base_model_tp_plan" else BATCH // 4,
        max_steps=STEPS,
        learning_rate=RATE,
        adam_epsilon=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=NORM,
        logging_steps=1,
        train_sampling_strategy="sequential",
        gradient_checkpointing=checkpointing,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    assert arguments.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = [{"input_ids": ids, "labels": ids} for ids in batches()]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    found = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    hub.save(trainer.model, folder / "after")
    saved = LlamaForCausalLM.from_pretrained(folder / "after")
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    logging.disable_progress_bar()
    checks.run(
        {
            "tensor parallel": partial(train, "base_model_tp_plan", False),
            "tensor parallel, gradient checkpointing": partial(train, "base_model_tp_plan", True),
            "fully sharded, gradient checkpointing": partial(train, "fully_sharded", True),
        }
    )
