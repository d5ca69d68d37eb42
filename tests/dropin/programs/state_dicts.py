"""PyTorch's state-dict helpers in all their options, on fully_shard, tensor parallel, and both; against one device."""

import copy
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as library
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree

HIDDEN = 6
FULL = StateDictOptions(full_state_dict=True)
MISSING = {"1.body.up.weight", "1.body.up.bias"}


class Block(nn.Module):
    """A feed-forward layer with a buffer; its state dict, and so its checkpoints, lack the name `body`."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("steps", torch.tensor(2))

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Block()

    def forward(self, x):
        return self.body(x)


class Renamed(Wrapped):
    """Its state dict names the tensors of `body` without "body.", which `dsd_fqn_modifiers` says."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.without_body)
        self.register_load_state_dict_pre_hook(self.with_body)

    def renamed(self):
        return {name: "body" for name, _ in self.body.named_children()} | {"seen": "body", "steps": "body"}

    @staticmethod
    def without_body(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith(f"{prefix}body.")]:
            state[prefix + key.removeprefix(f"{prefix}body.")] = state.pop(key)

    @staticmethod
    def with_body(module, state, prefix, *unused):
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}body.{key.removeprefix(prefix)}"] = state.pop(key)


def new_model(block=Wrapped):
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    model[1].body.up.weight.requires_grad_(False)
    return model


def sharded(kind, block=Wrapped):
    """The model, how many shares a batch has, and which of them is this rank's."""
    model = new_model(block)
    shape, names = {"fsdp": ((4,), ("dp",)), "tp": ((4,), ("tp",)), "dp x tp": ((2, 2), ("dp", "tp"))}[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        for wrapped in model:
            plan = {"up": library.parallel.ColwiseParallel(), "down": library.parallel.RowwiseParallel()}
            library.parallel.parallelize_module(wrapped.body, mesh["tp"], plan)
    if "dp" not in names:
        return model, (1, 0)
    for wrapped in model:
        fully_shard(wrapped, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), (mesh["dp"].size(), mesh.get_local_rank("dp"))


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, optimizer, share, steps, seed=1):
    torch.manual_seed(seed)
    for _ in range(steps):
        batch, target = torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)
        batch, target = (value.chunk(share[0])[share[1]] for value in (batch, target))
        (model(batch) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(found, expected, what):
    """Nested dicts and lists are the same, with tensors gathered where they are distributed."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (what, found.keys(), expected.keys())
        for key, value in expected.items():
            assert_same(found[key], value, f"{what} {key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), what
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, what)
    elif isinstance(expected, torch.Tensor):
        found = found.full_tensor() if isinstance(found, library.DTensor) else found
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=lambda message: f"{what}: {message}")
    else:
        assert found == expected, (what, found, expected)


def has_dtensors(state):
    return any(isinstance(value, library.DTensor) for value in pytree.tree_leaves(state))


def get_with_every_option(kind, trained, plain):
    for layout in (
        {},
        {"full_state_dict": True},
        {"cpu_offload": True},
        {"full_state_dict": True, "cpu_offload": True},
    ):
        for choice in ({}, {"ignore_frozen_params": True}, {"flatten_optimizer_state_dict": True}):
            found = get_state_dict(*trained, options=StateDictOptions(**layout, **choice))
            expected = get_state_dict(*plain, options=StateDictOptions(**choice))
            assert has_dtensors(found) == (not layout.get("full_state_dict"))
            if len(layout) == 2 and dist.get_rank() > 0:
                expected = {}, {}
            assert_same(list(found), list(expected), f"{kind} {layout} {choice}")
    for keep in (True, False):
        options = StateDictOptions(keep_submodule_prefixes=keep)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # for the option `submodules`
            found = get_model_state_dict(trained[0], submodules={trained[0][0]}, options=options)
            expected = get_model_state_dict(plain[0], submodules={plain[0][0]}, options=options)
        assert_same(found, expected, f"{kind} prefixes {keep}")


def fresh(kind, block=Wrapped):
    model, _ = sharded(kind, block)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    return model, optimizer_of(model)


def set_with_every_option(kind, share, trained, plain):
    """Every way to set the states gives a training that goes on like that of one device."""
    state = get_state_dict(*plain)
    after = copy.deepcopy(plain)
    train(*after, (1, 0), 1, seed=2)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    first_rank = state if dist.get_rank() == 0 else ({}, {})
    ways = {
        "full": (state, FULL),
        "full to cpu": (state, StateDictOptions(full_state_dict=True, cpu_offload=True)),
        "from rank 0": (first_rank, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
        "sharded": (get_state_dict(*trained), StateDictOptions()),
        "sharded and flat": (get_state_dict(*trained, options=flat), flat),
    }
    for way, (given, options) in ways.items():
        model, optimizer = fresh(kind)
        weights, moments = copy.deepcopy(given)
        if options.broadcast_from_rank0:
            # PyTorch's `set_state_dict` forgets the weights on ranks that are given none, and then waits forever.
            set_model_state_dict(model, weights, options=options)
            set_optimizer_state_dict(model, optimizer, moments, options=options)
        else:
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
        for parameter, moment in optimizer.state.items():
            assert not isinstance(parameter, library.DTensor) or moment["exp_avg"].placements == parameter.placements
        train(model, optimizer, share, 1, seed=2)
        assert_same(list(get_state_dict(model, optimizer, options=FULL)), list(get_state_dict(*after)), f"{kind} {way}")


def set_with_missing_keys(kind, plain):
    """Without `strict`, what is missing keeps its value. With it, PyTorch finds them if broadcasting."""
    state = {key: value for key, value in plain[0].state_dict().items() if key not in MISSING}
    expected = {**plain[0].state_dict(), **{key: torch.full_like(plain[0].state_dict()[key], 0.5) for key in MISSING}}
    for broadcast in (False, True):
        given = dict(state) if dist.get_rank() == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=broadcast)
        model, _ = fresh(kind)
        set_model_state_dict(model, given, options=options)
        assert_same(get_model_state_dict(model, options=FULL), expected, f"{kind} missing {broadcast}")
    given = dict(state) if dist.get_rank() == 0 else {}
    message = ""
    try:
        set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    except RuntimeError as error:
        message = str(error)
    assert all(key in message for key in MISSING), message


def set_renamed_and_on_meta(kind, plain):
    expected = plain[0].state_dict()
    with torch.device("meta"):
        model, _ = sharded(kind)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of PyTorch, about a function that it uses
        set_model_state_dict(model, plain[0].state_dict() if dist.get_rank() == 0 else {}, options=options)
    assert_same(get_model_state_dict(model, options=FULL), expected, f"{kind} meta")
    model, _ = fresh(kind, Renamed)
    named = {key.replace("body.", ""): value for key, value in expected.items()}
    set_model_state_dict(
        model, dict(named), options=StateDictOptions(full_state_dict=True, dsd_fqn_modifiers="renamed")
    )
    assert_same(model.state_dict(), named, f"{kind} renamed")


def run(kind):
    model, share = sharded(kind)
    trained, plain = ((m, optimizer_of(m)) for m in (model, new_model()))
    train(*trained, share, 2)
    train(*plain, (1, 0), 2)
    get_with_every_option(kind, trained, plain)
    moments = get_optimizer_state_dict(*trained, options=FULL)
    assert not has_dtensors(moments)
    assert_same(moments, get_optimizer_state_dict(*plain), kind)
    set_with_every_option(kind, share, trained, plain)
    set_with_missing_keys(kind, plain)
    set_renamed_and_on_meta(kind, plain)


if __name__ == "__main__":
    import checks  # beside this file; the tests import it from elsewhere

    checks.run({f"state-dict helpers, {kind}": lambda _, kind=kind: run(kind) for kind in ("fsdp", "tp", "dp x tp")})
