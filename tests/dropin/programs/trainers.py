"""transformers' Trainer, accelerate and peft over models that are sharded when they are loaded; against one device.

accelerate allows its ParallelismConfig and fully_shard on accelerators only, with PyTorch's DTensor as well. Here it is
told that the processes are such, so that the same lines of it run on CPUs.
"""

import os

import checks
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.utils import logging

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 66}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
BATCH, STEPS = 8, 2


def full(state):
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def assert_same(found, expected, what):
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{what} {n}: {m}")


def load(folder, **parallel):
    config = DistributedConfig(**parallel) if parallel else None
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)


def batches():
    torch.manual_seed(1)
    return torch.randint(1, 64, (STEPS * BATCH, 8))


def train_plain(model):
    """Train on one device; return its losses and the norms of its gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    results = []
    for ids in batches().split(BATCH):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


class Log(TrainerCallback):
    def __init__(self):
        self.results = []

    def on_log(self, args, state, control, logs=None, **unused):
        if "loss" in logs:
            self.results.append((logs["loss"], logs["grad_norm"]))


def trainer(model, folder, shares, **options):
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH // shares,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    assert arguments.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    log = Log()
    data = [{"input_ids": ids, "labels": ids} for ids in batches()]
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[log]), log


def train_with_trainer(folder, expected, results):
    """Tensor parallel, fully_shard and both, by transformers; fully_shard by accelerate, with a resumed run."""
    kinds = {
        "tp": {"tp_size": 4, "tp_plan": "auto"},
        "fsdp": {"fsdp_size": 4},
        "fsdp x tp": {"fsdp_size": 2, "tp_size": 2},
        "accelerate": {},
    }
    for kind, parallel in kinds.items():
        shares = 4 if kind == "accelerate" else parallel.get("fsdp_size", 1)
        options = {"fsdp": True, "fsdp_config": {"version": 2}, "save_steps": 1}
        options = options if kind == "accelerate" else {"save_strategy": "no"}
        made, log = trainer(load(folder / "before", **parallel), folder / kind, shares, **options)
        assert kind == "accelerate" or any(isinstance(p, DTensor) for p in made.model.parameters())
        made.train()
        torch.testing.assert_close(torch.tensor(log.results), torch.tensor(results), rtol=1e-3, atol=1e-3)
        made.save_model(str(folder / f"{kind} after"))
        dist.barrier()
        assert_same(load_file(folder / f"{kind} after" / "model.safetensors"), expected.state_dict(), kind)
        if kind == "fsdp x tp":
            made.model.save_pretrained(folder / "shards", distributed_checkpoint=True)
            loaded = load(folder / "shards", **parallel)
            assert_same(full(loaded.state_dict()), expected.state_dict(), "distributed checkpoint")
    resumed, log = trainer(load(folder / "before"), folder / "accelerate", 4, **options)
    resumed.train(resume_from_checkpoint=str(folder / "accelerate" / f"checkpoint-{STEPS - 1}"))
    torch.testing.assert_close(torch.tensor(log.results), torch.tensor(results[-1:]), rtol=1e-3, atol=1e-3)


def reset_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train_with_accelerate(folder, kind, expected, results):
    """`prepare`, `backward`, `clip_grad_norm_` and the ways to save, of tensor parallel and of fully_shard."""
    reset_accelerate()
    if kind == "tp":
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=4))
        model, shares = load(folder / "before", tp_size=4), 1
    else:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, shares = load(folder / "before"), 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = DataLoader(batches(), batch_size=BATCH // shares)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids, (loss, norm) in zip(loader, results, strict=True):
        found = model(input_ids=ids, labels=ids).loss
        accelerator.backward(found)
        found_norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found = accelerator.gather(found.detach()).mean().item()
        assert abs(found - loss) < 1e-3, (kind, found, loss)
        assert abs(found_norm.item() - norm) < 1e-3, (kind, found_norm, norm)
    save = save_tensor_parallel if kind == "tp" else save_fully_sharded
    save(folder / f"accelerate {kind}", accelerator, model, expected)


def save_tensor_parallel(folder, accelerator, model, expected):
    """`save_model` is an error, because accelerate gathers nothing here; full tensors are saved."""
    assert_same(full(accelerator.get_state_dict(model)), expected.state_dict(), "get_state_dict")
    message = ""
    try:
        accelerator.save_model(model, folder)
    except Exception as error:
        message = str(error)
    assert "full_state_dict=True" in message, message
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    accelerator.save(state, folder / "model.safetensors", safe_serialization=True)
    dist.barrier()
    assert_same(load_file(folder / "model.safetensors"), expected.state_dict(), "save")


def save_fully_sharded(folder, accelerator, model, expected):
    state = accelerator.get_state_dict(model)
    assert_same(state, expected.state_dict() if accelerator.is_main_process else {}, "get_state_dict")
    accelerator.save_model(model, folder)
    accelerator.save_state(folder / "state")
    dist.barrier()
    assert_same(load_file(folder / "model.safetensors"), expected.state_dict(), "save_model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    accelerator.load_state(folder / "state")
    assert_same(full(model.state_dict()), expected.state_dict(), "load_state")


def train_adapters(folder):
    """Low-rank adapters over a tensor-parallel model: trained, saved, loaded and merged."""
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    expected = get_peft_model(load(folder / "before"), config)
    if dist.get_rank() == 0:
        expected.save_pretrained(folder / "first adapter")
    dist.barrier()
    model = PeftModel.from_pretrained(load(folder / "before", tp_size=4), folder / "first adapter", is_trainable=True)
    results = train_plain(expected)
    found = train_plain(model)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(results), rtol=1e-3, atol=1e-3)
    model.save_pretrained(folder / "adapter")
    dist.barrier()
    ids = batches()[:2]
    loaded = PeftModel.from_pretrained(load(folder / "before"), folder / "adapter")
    again = PeftModel.from_pretrained(load(folder / "before", tp_size=4), folder / "adapter")
    logits = expected(ids).logits
    with implicit_replication():  # one of the two factors of an update is a plain tensor, the same on every rank
        merged = model.merge_and_unload()
    for way in (loaded, again, merged):
        torch.testing.assert_close(way(ids).logits, logits, rtol=1e-3, atol=1e-3)


class Reference:
    """The model before training, in a folder that all checks share, and what training it on one device gives."""

    results = None

    def __call__(self, own):
        folder = own.parent
        if self.results is None:
            if dist.get_rank() == 0:
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder / "before")
            dist.barrier()
            self.model = load(folder / "before")
            self.results = train_plain(self.model)
        return folder, self.model, self.results


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    logging.disable_progress_bar()
    reference = Reference()

    def accelerated(own, kind):
        folder, expected, results = reference(own)
        train_with_accelerate(folder, kind, expected, results)

    checks.run(
        {
            "peft: LoRA over tensor parallel": lambda own: train_adapters(reference(own)[0]),
            "accelerate: tensor parallel": lambda own: accelerated(own, "tp"),
            "transformers Trainer": lambda own: train_with_trainer(*reference(own)),
            # With fully_shard, accelerate lets transformers load weights on rank 0 alone, and sends them to the others.
            "accelerate: fully_shard": lambda own: accelerated(own, "fsdp"),
        }
    )
