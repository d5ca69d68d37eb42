"""Running the user's program: on one device, or on simulated ranks, from the same seed and the same parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .._torch.modes import OwnMode
from .._torch.ops import OpOverload
from .._torch.pytree import tree_leaves, tree_map
from ..comm.groups import adopt
from ..errors import InputError
from ..ops.call import Args, Kwargs
from ..sharding.mesh import DeviceMesh, init_device_mesh
from ..sharding.placement import Placement
from ..sharding.source_lines import Line, is_library
from ..tensor.creation import distribute_tensor
from ..world import RankTensor, replicate, simulate
from .rank_numbers import rank_numbers
from .rank_program import RankProgram, make_per_rank
from .ranks import Axes
from .recording import Recorder, Recording, plain_path
from .tolerance import move

Batch = object


@dataclass(frozen=True)
class Program:
    """What the user passed to `verify`."""

    build_model: Callable[[], nn.Module]
    apply: Callable[[nn.Module, DeviceMesh], nn.Module | None]
    batches: Sequence[Batch]
    """One for each step. They are made before any run, so that all runs get the same batches."""
    loss: Callable[..., Tensor] | None
    place: Callable[[Batch, DeviceMesh], Batch] | Sequence[Placement] | None
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None
    step: Callable[..., object] | None
    steps: int
    seed: int
    dtype: torch.dtype | None
    distinct: bool
    device: str

    def in_own_dtype(self) -> Program:
        """Return the program that runs in the dtypes that its model is built with."""
        return replace(self, dtype=None)


@dataclass
class Initial:
    """The parameters that a program starts from, and the noise that makes their elements distinct."""

    built: dict[str, Tensor]
    noise: dict[str, Tensor]


# ---- on one device ---------------------------------------------------------------------------------------------------


def run_alone(program: Program, eps: float = 0.0, noise_seed: int = 0) -> tuple[Recording, Initial]:
    """Run the program on one device; with `eps`, from parameters that were moved by a few roundings."""
    dtypes = FloatDtypes()
    with _set_up(program):
        model = _built(program)
        initial = Initial(_state(model), _noise(model) if program.distinct else {})
        _add_noise(model, initial.noise)
        if eps:
            move(list(model.parameters()), eps, noise_seed)
        recorder = Recorder(model, all_inputs=True)
        with dtypes if not eps else nullcontext():
            _train(program, model, recorder, None)
    recorder.made.dtypes = dtypes.found | {p.dtype for p in model.parameters() if p.is_floating_point()}
    return recorder.made, initial


class FloatDtypes(OwnMode):
    """Collects the floating-point dtypes of the results of all ops inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.found.add(leaf.dtype)
        return result


# ---- on simulated ranks ----------------------------------------------------------------------------------------------


def run_on_ranks(program: Program, axes: Axes, initial: Initial) -> Recording:
    """Run the program on simulated ranks. An error of the program is stored in the recording."""
    with ExitStack() as stack:
        stack.enter_context(simulate(len(axes.coordinates())))
        stack.enter_context(_set_up(program))
        mesh = init_device_mesh(program.device, axes.sizes, mesh_dim_names=axes.names)
        adopt(mesh)  # makes its groups, which code without DTensors uses, too
        stack.enter_context(rank_numbers(axes))
        stack.enter_context(RankProgram())
        model = _built(program)
        make_per_rank(model)
        _start_from(model, initial)
        applied = program.apply(model, mesh)
        model = model if applied is None else applied
        recorder = Recorder(model, all_inputs=False)
        try:
            _train(program, model, recorder, mesh)
        except Exception as error:
            recorder.made.error = error
        return recorder.made


def _start_from(model: nn.Module, initial: Initial) -> None:
    """Copy the parameters of the one-device model to the ranks, except those in which ranks already differ.

    A model that is built twice from one seed may differ, for example if it has a generator of its own. Parameters that
    differ between ranks are left as they are, so that the comparison finds them.
    """
    with torch.no_grad():
        for name, tensor in _named_state(model):
            built = initial.built.get(name)
            if isinstance(tensor, RankTensor) and built is not None and built.shape == tensor.shards[0].shape:
                if all(torch.equal(shard, tensor.shards[0]) for shard in tensor.shards):
                    tensor.copy_(replicate(built))
                if name in initial.noise:
                    tensor.add_(replicate(initial.noise[name]))


# ---- both ------------------------------------------------------------------------------------------------------------


@contextmanager
def _set_up(program: Program) -> Iterator[None]:
    """Run with the program's default dtype on one thread, and leave the random state of the caller alone."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        if program.dtype is not None:
            torch.set_default_dtype(program.dtype)
        torch.set_num_threads(1)  # tensors are small, and threads would wait for each other
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            torch.set_num_threads(threads)


def _built(program: Program) -> nn.Module:
    torch.manual_seed(program.seed)
    model = program.build_model()
    if not isinstance(model, nn.Module):
        raise InputError(f"build_model() returned a {type(model).__name__}", "return an nn.Module")
    model = model.to(program.device)
    return model.to(program.dtype) if program.dtype is not None else model


def _train(program: Program, model: nn.Module, recorder: Recorder, mesh: DeviceMesh | None) -> None:
    optimizer = program.optimizer(model.parameters()) if program.optimizer is not None else None
    recorder.step = -1
    recorder.state("initial")
    takes_optimizer = program.step is not None and "optimizer" in inspect.signature(program.step).parameters
    for step in range(program.steps):
        recorder.begin(step)
        torch.manual_seed(program.seed + 1 + step)
        with recorder.recording(optimizer):
            batch = _batch(program, step, mesh)
            result = _run_step(program, model, batch, mesh, optimizer if takes_optimizer else None)
            for name, value in (result if isinstance(result, Mapping) else {"loss": result}).items():
                recorder.add("loss" if name == "loss" else "value", name, value, line=_line_of(program))
            if optimizer is not None and not takes_optimizer:
                optimizer.step()
                optimizer.zero_grad()
            elif optimizer is None:
                recorder.gradients()
        recorder.state("step")


def _run_step(
    program: Program, model: nn.Module, batch: Batch, mesh: DeviceMesh | None, optimizer: torch.optim.Optimizer | None
) -> object:
    if program.step is not None:
        return program.step(model, batch, mesh, **({} if optimizer is None else {"optimizer": optimizer}))
    if isinstance(batch, Mapping):
        output = model(**batch)
        arguments: tuple[object, ...] = (batch,)
    elif isinstance(batch, (tuple, list)):
        *inputs, target = batch
        output, arguments = model(*inputs), (target,)
    else:
        output, arguments = model(batch), ()
    if program.loss is not None:
        loss = program.loss(output, *arguments)
    else:
        returned = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if returned is None or returned.dim():
            raise InputError(
                "verify got no loss=, and the output of the model is no scalar and has no .loss",
                "pass loss=, a function of the model's output and the targets",
            )
        loss = returned
    loss.backward()
    return loss.detach()


def _line_of(program: Program) -> Line | None:
    """Return the first line of the user's function that computes the loss; None if a library's function does."""
    code = getattr(inspect.unwrap(program.step or program.loss or program.build_model), "__code__", None)
    return None if code is None or is_library(code.co_filename) else Line.at(code.co_filename, code.co_firstlineno)


def _batch(program: Program, step: int, mesh: DeviceMesh | None) -> Batch:
    batch = _map(program.batches[step], lambda tensor: _cast(tensor, program))
    if mesh is None:
        return batch
    batch = _map(batch, replicate)
    if callable(program.place):
        return program.place(batch, mesh)
    if program.place is None:
        return batch
    placements = program.place
    return _map(batch, lambda tensor: distribute_tensor(tensor, mesh, placements))


def _map(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _cast(tensor: Tensor, program: Program) -> Tensor:
    floating = program.dtype is not None and tensor.is_floating_point()
    return tensor.to(program.device, program.dtype if floating else tensor.dtype)


# ---- parameters ------------------------------------------------------------------------------------------------------


def _named_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(plain_path(name), tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _named_state(model)}


def _noise(model: nn.Module) -> dict[str, Tensor]:
    """Return noise that makes all elements of a parameter distinct, for parameters that have equal ones.

    A bias of zeros hides that it is added twice, and equal elements hide that they are in the wrong place.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and len(parameter.detach().unique()) < parameter.numel():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            found[plain_path(name)] = noise.to(parameter.device, parameter.dtype)
    return found


def _add_noise(model: nn.Module, noise: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if plain_path(name) in noise:
                parameter.add_(noise[plain_path(name)])
