"""Importing shardwise, and using it, leaves PyTorch as it is for other tensors. Run as a program, before any import."""

import sys
import warnings

import torch
import torch.distributed
import torch.distributed.checkpoint.hf_storage
import torch.distributed.checkpoint.state_dict  # part of what is looked at below
import torch.masked
import torch.nn.functional as F
from torch import nn

OWN_KEY = "PythonTLSSnapshot"
"""The dispatch key that tensor subclasses have, and plain tensors lack."""
OWN_KERNELS = {("aten::embedding", "FuncTorchBatched")}
"""Kernels in whose place ours stand, and call them for plain tensors."""


def held_by_pytorch():
    """Every function, class and property that a module of PyTorch, or a class of it, holds: by where it is held."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                found |= {(value, k): v for k, v in list(vars(value).items())}
    code = (property, classmethod, staticmethod)
    return {place: value for place, value in found.items() if callable(value) or isinstance(value, code)}


def kernels():
    """The dispatch table of every op, without the line of the key that plain tensors lack."""
    names = torch._C._dispatch_get_all_op_names()
    tables = {name: torch._C._dispatch_dump_table(name) for name in names if torch._C._dispatch_has_kernel(name)}
    return {name: [line for line in text.split("\n") if OWN_KEY not in line] for name, text in tables.items()}


def settings():
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.random.get_rng_state().tolist(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.overrides.get_default_nowrap_functions() == torch.overrides.get_default_nowrap_functions(),
        list(warnings.filters),
        torch.distributed.is_initialized(),
    )


def values():
    """Results, gradients and classes of functions that shardwise wraps, and of some that it does not."""
    torch.manual_seed(0)
    x, bag = torch.randn(5, 2, 4, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    attention = nn.MultiheadAttention(4, 2)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    results = [
        *(module(4, 3)(x)[0] for module in (nn.RNN, nn.GRU, nn.LSTM)),
        *(module(4, 3)(x[0]) for module in (nn.RNNCell, nn.GRUCell)),
        F.embedding_bag(torch.tensor([1, 2, 5]), bag, torch.tensor([0, 2])),
        attention(x, x, x)[0],
        layer(x, src_mask=torch.zeros(2, 2)),
        torch.masked.mean(x, 0),
        torch.masked.var(x, 0),
        F.fractional_max_pool2d(x.reshape(1, 1, 5, 8), 2, output_size=2),
        torch.unravel_index(torch.tensor(7), (3, 4))[0],
        F.linear(x, torch.ones(3, 4)),
        x.cumprod(0),
        torch.combinations(x[0, 0]),
        F.rms_norm(x, (4,)),
        torch.vmap(F.embedding)(torch.tensor([[0, 1], [1, 0]]), torch.stack([bag[:2], bag[2:4]])),
    ]
    sum(result.float().sum() for result in results).backward()
    assert all(type(value) is torch.Tensor for value in (*results, x.grad, bag.grad))
    return [value.detach().clone() for value in (*results, x.grad, bag.grad)]


def is_other(found, expected):
    """Whether another value stands at a place, unless PyTorch itself put it there, as it does on first use."""
    code = getattr(getattr(found, "fget", found), "__code__", None)
    return found is not expected and not (code is not None and code.co_filename.startswith(torch.__path__[0]))


def main():
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")
    torch.distributed.checkpoint.state_dict.get_model_state_dict(nn.Linear(2, 2))
    values()
    before = values(), held_by_pytorch(), kernels(), settings()
    others = set(sys.modules)
    import shardwise

    imported = {name for name in sys.modules if name not in others and name.partition(".")[0] != "shardwise"}
    assert not imported, f"import shardwise takes time for {sorted(imported)}"
    assert before[3] == settings()
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = shardwise.distribute_tensor(torch.ones(4, 2), mesh, [shardwise.Shard(0)])
        F.linear(x, x).sum()
    after = values(), held_by_pytorch(), kernels(), settings()
    assert before[3] == after[3]
    for found, expected in zip(after[0], before[0], strict=True):
        assert torch.equal(found, expected)
    for name, lines in before[2].items():
        other = [line for line in after[2][name] if line not in lines]
        assert all((name, line.partition(":")[0]) in OWN_KERNELS for line in other), (name, other)
    changed = {place for place, value in before[1].items() if is_other(after[1].get(place, value), value)}
    for place in changed:
        found, expected = after[1][place], before[1][place]
        assert getattr(found, "__wrapped__", None) is expected, (place, expected, found)
    print(*sorted({name for _, name in changed}))


if __name__ == "__main__":
    main()
