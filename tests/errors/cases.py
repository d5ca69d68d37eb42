"""Bad input and what is said about it: one row for each mistake.

The rows run in the simulated world and on real processes. Every rank must raise the very same error, and nothing may
have been communicated by then.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import (
    DTensor,
    DTensorSpec,
    InterleavedShard,
    P,
    Partial,
    Replicate,
    Shard,
    ShardOrderEntry,
    distribute_tensor,
    errors,
)
from shardwise.nn import attention_over_sequence, packed_attention


class World:
    """What the rows use: meshes and tensors."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        self.whole = torch.arange(24.0).view(6, 4)
        self.x = distribute_tensor(self.whole, self.mesh, [Shard(0), Replicate()])
        self.y = distribute_tensor(self.whole, self.line, [Shard(0)])
        self.leaf = distribute_tensor(self.whole, self.mesh, [Shard(0), Replicate()]).requires_grad_()
        self.meta = self.x._spec.tensor_meta
        self.rows = distribute_tensor(self.whole, self.mesh["tp"], [Shard(0)], src_data_rank=None)
        self.partial = distribute_tensor(self.whole, self.mesh, [Partial(), Replicate()])


class Row(NamedTuple):
    """A mistake, the error, and its text: the problem and the fix."""

    call: Callable[[World], Any]
    error: type[errors.ShardwiseError]
    problem: str
    fix: str


def set_data(x: DTensor, value: torch.Tensor) -> None:
    x.data = value


ROWS: dict[str, Row] = {
    # ---- placements
    "a placement too few": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [Shard(0)]),
        errors.PlacementError,
        "1 placement [Shard(dim=0)] for mesh(dp=2, tp=2), which has 2 axes",
        "give one placement for each axis",
    ),
    "a placement too many": Row(
        lambda w: w.x.redistribute(placements=[Shard(0), Shard(1), Replicate()]),
        errors.PlacementError,
        "3 placements [Shard(dim=0), Shard(dim=1), Replicate()] for mesh(dp=2, tp=2), which has 2 axes",
        "give one placement for each axis",
    ),
    "too many for one axis": Row(
        lambda w: w.y.redistribute(placements=[Shard(0), Shard(1)]),
        errors.PlacementError,
        "2 placements [Shard(dim=0), Shard(dim=1)] for mesh(all=4), which has 1 axis",
        "give one placement for each axis",
    ),
    "a dim out of range": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [Shard(2), Replicate()]),
        errors.PlacementError,
        "Shard(dim=2) on axis dp, for a tensor of 2 dims",
        "use a dim in [-2, 1]",
    ),
    "a negative dim out of range": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [Replicate(), Shard(-3)]),
        errors.PlacementError,
        "Shard(dim=-3) on axis tp, for a tensor of 2 dims",
        "use a dim in [-2, 1]",
    ),
    "a dim of a 0-dim tensor": Row(
        lambda w: distribute_tensor(torch.tensor(1.0), w.mesh, [Shard(0), Replicate()]),
        errors.PlacementError,
        "Shard(dim=0) on axis dp, for a tensor of 0 dims",
        "a 0-dim tensor can be replicated or partial only",
    ),
    "a bare placement": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, Shard(0)),
        errors.InputError,
        "placements is Shard(dim=0)",
        "pass a list with one placement for each mesh axis, or P(...)",
    ),
    "a bare placement to redistribute": Row(
        lambda w: w.x.redistribute(placements=Replicate()),
        errors.InputError,
        "placements is Replicate()",
        "pass a list with one placement for each mesh axis, or P(...)",
    ),
    "a text": Row(
        lambda w: w.x.redistribute(placements="dp"),
        errors.InputError,
        "placements is 'dp'",
        "pass a list with one placement for each mesh axis, or P(...)",
    ),
    "texts": Row(
        lambda w: w.x.redistribute(placements=["dp", None]),
        errors.InputError,
        "the placement of axis dp is 'dp', a builtins.str",
        "use Shard, Replicate or Partial",
    ),
    "nothing": Row(
        lambda w: w.x.redistribute(),
        errors.InputError,
        "redistribute got no placements",
        "pass one placement for each mesh axis, e.g. placements=[Replicate(), ...], or P(...)",
    ),
    "a class": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [Replicate(), Shard]),
        errors.InputError,
        "the placement of axis tp is <class 'shardwise.sharding.placement.Shard'>, a builtins.type",
        "use Shard, Replicate or Partial",
    ),
    "a placement of PyTorch's own": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [theirs.Partial("band"), Replicate()]),
        errors.InputError,
        "the placement of axis dp is Partial(band), a torch.distributed.tensor.placement_types.Partial",
        "use Shard, Replicate or Partial",
    ),
    "a dim that is a text": Row(
        lambda w: Shard("0"),
        errors.InputError,
        "Shard(dim='0')",
        "the dim is an int, e.g. Shard(0)",
    ),
    "a dim that is a bool": Row(
        lambda w: Shard(True),
        errors.InputError,
        "Shard(dim=True)",
        "the dim is an int, e.g. Shard(0)",
    ),
    "an unknown reduction": Row(
        lambda w: Partial("mean"),
        errors.PlacementError,
        "Partial('mean') is no known reduction",
        "use one of sum, avg, max, min, product",
    ),
    "no blocks": Row(
        lambda w: InterleavedShard(0, 0),
        errors.InputError,
        "InterleavedShard(blocks=0)",
        "the number of blocks is an int >= 1",
    ),
    "half a block": Row(
        lambda w: InterleavedShard(0, 2.5),
        errors.InputError,
        "InterleavedShard(blocks=2.5)",
        "the number of blocks is an int >= 1",
    ),
    "blocks that do not divide": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [InterleavedShard(0, 4), Replicate()]),
        errors.LayoutError,
        (
            "[InterleavedShard(dim=0, blocks=4), Replicate()] on shape [6, 4] over mesh(dp=2, tp=2): 4 "
            "blocks of a local size of 6"
        ),
        "use a number of blocks that divides it",
    ),
    "blocks of an uneven part": Row(
        lambda w: shardwise.zeros(7, 4, device_mesh=w.mesh, placements=[Shard(0), InterleavedShard(0, 2)]),
        errors.LayoutError,
        (
            "[Shard(dim=0), InterleavedShard(dim=0, blocks=2)] on shape [7, 4] over mesh(dp=2, tp=2): "
            "2 interleaved blocks inside uneven shards of a dim of size 7"
        ),
        "list the interleaved axis first in the shard order, or use a size that the other axes divide",
    ),
    "an average of integers": Row(
        lambda w: distribute_tensor(torch.arange(4), w.line, [Partial("avg")]),
        errors.CommunicationError,
        "Partial(avg) cannot reduce torch.int64",
        "an average needs a floating-point dtype: cast first, e.g. x.float()",
    ),
    "the largest complex number": Row(
        lambda w: DTensor.from_local(torch.ones(4, dtype=torch.complex64), w.line, [Partial("max")]),
        errors.CommunicationError,
        "Partial(max) cannot reduce torch.complex64: complex numbers have no order",
        "use Partial('sum') or 'product'",
    ),
    "too few for the gradient": Row(
        lambda w: w.leaf.to_local(grad_placements=[Shard(0)]),
        errors.PlacementError,
        "1 placement [Shard(dim=0)] for mesh(dp=2, tp=2), which has 2 axes",
        "give one placement for each axis",
    ),
    # ---- P
    "an unknown axis": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, P("pp")),
        errors.PlacementError,
        "P('pp') names the axis 'pp'",
        "the mesh has the axes dp, tp",
    ),
    "an axis on two dims": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, P("dp", "dp")),
        errors.PlacementError,
        "P('dp', 'dp') uses the axis 'dp' twice",
        "name each axis once: it shards one dim, or is partial",
    ),
    "an axis twice on a dim": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, P(("dp", "dp"))),
        errors.PlacementError,
        "P(('dp', 'dp')) uses an axis twice on one dim",
        "name each axis once",
    ),
    "an axis that cuts and is partial": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, P("dp", partial={"dp": "sum"})),
        errors.PlacementError,
        "P('dp', partial={'dp': 'sum'}) uses the axis 'dp' twice",
        "name each axis once: it shards one dim, or is partial",
    ),
    "more entries than dims": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, P("dp", None, "tp")),
        errors.PlacementError,
        "P('dp', None, 'tp') names 3 dims of a tensor that has 2",
        "give at most one entry for each dim",
    ),
    "an unknown reduction in P": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, P("dp", partial={"tp": "total"})),
        errors.PlacementError,
        "Partial('total') is no known reduction",
        "use one of sum, avg, max, min, product",
    ),
    "a number in P": Row(
        lambda w: P(0),
        errors.InputError,
        "P(...) got 0",
        "each entry is an axis name, a tuple of axis names, or None",
    ),
    "a placement in P": Row(
        lambda w: P(Shard(0)),
        errors.InputError,
        "P(...) got Shard(dim=0)",
        "each entry is an axis name, a tuple of axis names, or None",
    ),
    "a list in P": Row(
        lambda w: P(["dp"]),
        errors.InputError,
        "P(...) got ['dp']",
        "each entry is an axis name, a tuple of axis names, or None",
    ),
    "None among axes": Row(
        lambda w: P(("dp", None)),
        errors.InputError,
        "P(...) got ('dp', None)",
        "each entry is an axis name, a tuple of axis names, or None",
    ),
    "partial axes without their op": Row(
        lambda w: P("dp", partial="tp"),
        errors.InputError,
        "P(partial='tp')",
        'name the axes and their reductions, e.g. partial={"tp": "sum"}',
    ),
    # ---- shard order
    "an order that leaves out an axis": Row(
        lambda w: DTensorSpec(w.mesh, [Shard(0), Shard(0)], w.meta, (ShardOrderEntry(0, (0,)),)),
        errors.PlacementError,
        (
            "the shard order (ShardOrderEntry(tensor_dim=0, mesh_dims=(0,)),) does not list the axes "
            "that [Shard(dim=0), Shard(dim=0)] shard over"
        ),
        "list the same axes, in any order: (ShardOrderEntry(tensor_dim=0, mesh_dims=(0, 1)),)",
    ),
    "an order that names another axis": Row(
        lambda w: DTensorSpec(w.mesh, [Shard(0), Replicate()], w.meta, (ShardOrderEntry(0, (1,)),)),
        errors.PlacementError,
        (
            "the shard order (ShardOrderEntry(tensor_dim=0, mesh_dims=(1,)),) does not list the axes "
            "that [Shard(dim=0), Replicate()] shard over"
        ),
        "list the same axes, in any order: (ShardOrderEntry(tensor_dim=0, mesh_dims=(0,)),)",
    ),
    "an order that names an axis twice": Row(
        lambda w: DTensorSpec(w.mesh, [Shard(0), Shard(0)], w.meta, (ShardOrderEntry(0, (1, 1)),)),
        errors.PlacementError,
        (
            "the shard order (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 1)),) does not list the axes "
            "that [Shard(dim=0), Shard(dim=0)] shard over"
        ),
        "list the same axes, in any order: (ShardOrderEntry(tensor_dim=0, mesh_dims=(0, 1)),)",
    ),
    # ---- meshes
    "a text for a mesh": Row(
        lambda w: distribute_tensor(w.whole, "cpu", [Shard(0)]),
        errors.InputError,
        "device_mesh is a str",
        "pass a DeviceMesh, e.g. init_device_mesh('cpu', (4,))",
    ),
    "sizes for a mesh": Row(
        lambda w: DTensor.from_local(w.whole, (2, 2), [Shard(0), Replicate()]),
        errors.InputError,
        "device_mesh is a tuple",
        "pass a DeviceMesh, e.g. init_device_mesh('cpu', (4,))",
    ),
    "no mesh": Row(
        lambda w: distribute_tensor(w.whole, placements=[Shard(0)]),
        errors.MeshError,
        "no device_mesh was given",
        "pass one, or call inside a `with mesh:` block",
    ),
    "no mesh for local tensors": Row(
        lambda w: DTensor.from_local(w.whole, placements=[Shard(0)]),
        errors.MeshError,
        "no device_mesh was given",
        "pass one, or call inside a `with mesh:` block",
    ),
    "no mesh for a new tensor": Row(
        lambda w: shardwise.zeros(4, placements=[Shard(0)]),
        errors.MeshError,
        "no device_mesh was given",
        "pass one, or call inside a `with mesh:` block",
    ),
    "from the instances of a submesh to another mesh": Row(
        lambda w: w.rows.redistribute(w.line, [Shard(0)]),
        errors.MeshError,
        "cannot move f32[6@tp, 4] from mesh(tp=2), a submesh with 2 parallel instances, to mesh(all=4): each instance "
        "has a tensor of its own",
        "make one tensor of them on the mesh that the submesh was sliced from, e.g. "
        "DTensor.from_local(x.to_local(), mesh, [Replicate(), *x.placements])",
    ),
    "gradients from the instances of a submesh": Row(
        lambda w: w.leaf.redistribute(w.mesh["tp"], [Shard(0)]),
        errors.MeshError,
        "redistribute of f32[6@dp, 4] with gradients to mesh(tp=2), a submesh with 2 parallel instances: each would "
        "have a gradient of its own",
        "redistribute to the mesh that it was sliced from, and state there how local gradients are combined: "
        "to_local(grad_placements=[Partial(), ...])",
    ),
    "placements for another mesh": Row(
        lambda w: w.x.redistribute(w.line, [Shard(0), Replicate()]),
        errors.PlacementError,
        "2 placements [Shard(dim=0), Replicate()] for mesh(all=4), which has 1 axis",
        "give one placement for each axis",
    ),
    "a transfer without a state dict": Row(
        lambda w: shardwise.transfer(None, w.line, [Shard(0)]),
        errors.InputError,
        "transfer got no state dict",
        "pass source=, the mesh of the ranks that have it, on all ranks",
    ),
    "a text for another mesh": Row(
        lambda w: w.x.redistribute("cpu", [Shard(0), Shard(1)]),
        errors.InputError,
        "device_mesh is a str",
        "pass a DeviceMesh, e.g. init_device_mesh('cpu', (4,))",
    ),
    "an op on two meshes": Row(
        lambda w: w.x + w.y,
        errors.MeshError,
        (
            "aten.add.Tensor on tensors of different meshes: f32[6@dp, 4] on mesh(dp=2, tp=2), "
            "f32[6@all, 4] on mesh(all=4)"
        ),
        "bring them to one mesh first: x.redistribute(mesh, placements)",
    ),
    # ---- tensors
    "a list of numbers": Row(
        lambda w: distribute_tensor([1.0, 2.0], w.mesh, [Shard(0), Replicate()]),
        errors.InputError,
        "distribute_tensor got a list",
        "pass a torch.Tensor",
    ),
    "a number": Row(
        lambda w: DTensor.from_local(3.0, w.mesh, [Shard(0), Replicate()]),
        errors.InputError,
        "from_local got a float",
        "pass a torch.Tensor",
    ),
    "a sparse tensor": Row(
        lambda w: distribute_tensor(torch.eye(4).to_sparse(), w.mesh, [Shard(0), Replicate()]),
        errors.InputError,
        "distribute_tensor got a tensor of layout torch.sparse_coo",
        "make it dense first: tensor.to_dense()",
    ),
    "a sparse local tensor": Row(
        lambda w: DTensor.from_local(torch.eye(4).to_sparse(), w.mesh, [Shard(0), Replicate()]),
        errors.InputError,
        "from_local got a tensor of layout torch.sparse_coo",
        "make it dense first: tensor.to_dense()",
    ),
    "a new sparse tensor": Row(
        lambda w: shardwise.zeros(4, layout=torch.sparse_coo, device_mesh=w.line, placements=[Shard(0)]),
        errors.InputError,
        "a DTensor cannot have layout=torch.sparse_coo: only torch.strided tensors can be distributed",
        "leave layout out",
    ),
    "a negative size": Row(
        lambda w: shardwise.zeros(-4, device_mesh=w.line, placements=[Shard(0)]),
        errors.ShapeError,
        "a DTensor cannot have the shape [-4]",
        "use sizes that are 0 or more",
    ),
    "a DTensor for a local tensor": Row(
        lambda w: DTensor.from_local(w.x, w.mesh, [Shard(0), Replicate()]),
        errors.InputError,
        "from_local got a DTensor",
        "pass its local shard, x.to_local(), or use x.redistribute",
    ),
    "a DTensor to cut otherwise": Row(
        lambda w: distribute_tensor(w.x, w.mesh, [Shard(1), Replicate()]),
        errors.PlacementError,
        ("distribute_tensor got f32[6@dp, 4], which is distributed already, for [Shard(dim=1), Replicate()]"),
        "use x.redistribute(placements=...) to change its placements",
    ),
    "a DTensor to replicate": Row(
        lambda w: distribute_tensor(w.x, w.mesh),
        errors.PlacementError,
        ("distribute_tensor got f32[6@dp, 4], which is distributed already, for [Replicate(), Replicate()]"),
        "use x.redistribute(placements=...) to change its placements",
    ),
    "a DTensor of another mesh": Row(
        lambda w: distribute_tensor(w.x, w.line, [Shard(0)]),
        errors.PlacementError,
        "distribute_tensor got f32[6@dp, 4], which is on mesh(dp=2, tp=2), not on mesh(all=4)",
        "use x.redistribute(mesh, placements) to bring it to another mesh",
    ),
    "a computed tensor": Row(
        lambda w: distribute_tensor(w.whole.clone().requires_grad_() * 2, w.line, [Shard(0)]),
        errors.InputError,
        "distribute_tensor got a tensor with a grad_fn",
        ("detach it, or keep gradients with DTensor.from_local(tensor, mesh, [Replicate(), ...]).redistribute(...)"),
    ),
    "a source that is not there": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [Shard(0), Replicate()], src_data_rank=2),
        errors.PlacementError,
        "distribute_tensor got src_data_rank=2, which is no index on every axis of mesh(dp=2, tp=2)",
        "use an index in [0, 1]",
    ),
    "a negative source": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [Shard(0), Replicate()], src_data_rank=-1),
        errors.PlacementError,
        "distribute_tensor got src_data_rank=-1, which is no index on every axis of mesh(dp=2, tp=2)",
        "use an index in [0, 1]",
    ),
    "a text for a source": Row(
        lambda w: distribute_tensor(w.whole, w.mesh, [Shard(0), Replicate()], src_data_rank="0"),
        errors.InputError,
        "distribute_tensor got src_data_rank='0'",
        "pass an index on every mesh axis, e.g. 0, or None to shard each rank's own tensor",
    ),
    # ---- shapes
    "a stride without a shape": Row(
        lambda w: DTensor.from_local(w.whole, w.line, [Shard(0)], stride=(4, 1)),
        errors.InputError,
        "from_local got a stride without a shape",
        "give both, or neither",
    ),
    "a shape of other dims": Row(
        lambda w: DTensor.from_local(w.whole, w.line, [Shard(0)], shape=(24,)),
        errors.ShapeError,
        "from_local got shape=[24] for a local tensor of 2 dims",
        "give one size for each dim, e.g. shape=(8, 16)",
    ),
    "a stride of other dims": Row(
        lambda w: DTensor.from_local(w.whole, w.line, [Shard(0)], shape=(24, 4), stride=(1,)),
        errors.ShapeError,
        "from_local got stride=[1] for a local tensor of 2 dims",
        "give one stride for each dim, e.g. stride=(16, 1)",
    ),
    "a bare placement with a shape": Row(
        lambda w: DTensor.from_local(w.whole, w.line, Shard(0), shape=(24, 4)),
        errors.InputError,
        "placements is Shard(dim=0)",
        "pass a list with one placement for each mesh axis, or P(...)",
    ),
    "a number for a shape": Row(
        lambda w: DTensor.from_local(w.whole, w.line, [Shard(0)], shape=24),
        errors.InputError,
        "from_local got shape=24",
        "give one size for each dim, e.g. shape=(8, 16)",
    ),
    # ---- tensors in use
    "a plain tensor among others": Row(
        lambda w: torch.mm(w.x, w.whole.t()),
        errors.MixedTensorError,
        "aten.mm.default mixes distributed tensors with a plain tensor of shape [4, 6], its argument 'mat2'",
        "make it one with distribute_tensor(tensor, mesh, placements) or DTensor.from_local(...), or take "
        "plain tensors as replicated inside `with shardwise.experimental.implicit_replication():`",
    ),
    "plain data": Row(
        lambda w: set_data(w.x, w.whole),
        errors.InputError,
        "the data of f32[6@dp, 4] was set to a plain tensor of shape [6, 4]",
        "distribute it first, x.data = distribute_tensor(data, x.device_mesh, x.placements), or take plain "
        "tensors as replicated inside `with shardwise.experimental.implicit_replication():`",
    ),
    "a local tensor with gradients": Row(
        lambda w: DTensor(w.whole.clone().requires_grad_(), w.x._spec),
        errors.InputError,
        "the DTensor constructor got a local tensor that requires grad",
        "use DTensor.from_local, which is differentiable, or detach it",
    ),
    "the memory of a tensor": Row(
        lambda w: w.x.share_memory_(),
        errors.InputError,
        "share_memory_ of f32[6@dp, 4]: a DTensor has no memory of its own, only its local shards have",
        "call it on the local shard of a rank, x.shards[rank], or, on processes, on x.full_tensor()",
    ),
    "the elements of a tensor, one by one": Row(
        lambda w: w.x.apply_(lambda value: value),
        errors.InputError,
        "apply_ of f32[6@dp, 4]: a DTensor has no memory of its own, only its local shards have",
        "call it on the local shard of a rank, x.shards[rank], or, on processes, on x.full_tensor()",
    ),
    "a tensor made sparse": Row(
        lambda w: w.x.to_sparse(),
        errors.InputError,
        "f32[6@dp, 4] cannot become a sparse tensor: a distributed tensor is dense",
        "use x.full_tensor().to_sparse()",
    ),
    "memory before a view": Row(
        lambda w: w.x.view(24)[6:].detach().as_strided((3,), (1,), 0),
        errors.InputError,
        "aten.as_strided.default with size [3], stride [1] and storage_offset 0 of a view of f32[18@dp] reaches memory "
        "that the tensor does not hold",
        "call it on the tensor that owns the memory: base.as_strided(size, stride, storage_offset)",
    ),
    "a result written into a plain number": Row(
        lambda w: torch.zeros((), requires_grad=True).clone().add_(w.x.sum()),
        errors.InputError,
        "aten.add_.Tensor would write the distributed result of f32[] sum(dp) into a plain tensor of shape []",
        "distribute that tensor first, distribute_tensor(tensor, mesh, placements), or write the global value, "
        "x.full_tensor(), into it",
    ),
    "random numbers into out=": Row(
        lambda w: torch.rand(6, 4, out=w.x),
        errors.InputError,
        "aten.rand.out cannot draw into the DTensor f32[6@dp, 4] as out=: each rank would draw numbers of its own",
        "use an in-place op, such as out.normal_(), or a factory with placements, such as "
        "shardwise.randn(8, 4, device_mesh=mesh, placements=[Shard(0), ...])",
    ),
    "normal numbers into out=": Row(
        lambda w: torch.randn(6, 4, out=w.x),
        errors.InputError,
        "aten.randn.out cannot draw into the DTensor f32[6@dp, 4] as out=: each rank would draw numbers of its own",
        "use an in-place op, such as out.normal_(), or a factory with placements, such as "
        "shardwise.randn(8, 4, device_mesh=mesh, placements=[Shard(0), ...])",
    ),
    "a plan to another shape": Row(
        lambda w: shardwise.plan(w.x, shardwise.zeros(8, device_mesh=w.mesh).spec),
        errors.CommunicationError,
        "f32[6@dp, 4] cannot be redistributed to f32[8], which has another shape",
        "give both specs the shape [6, 4]; x.view and its like change the shape of a tensor",
    ),
    "a method that does not exist": Row(
        lambda w: attention_over_sequence("rings").__enter__(),
        errors.InputError,
        "attention_over_sequence got method='rings'",
        "use one of 'ring', 'heads', 'gather', or None",
    ),
    "a plain key": Row(
        lambda w: packed_attention(w.x.view(6, 2, 2), torch.zeros(6, 2, 2), w.x.view(6, 2, 2), [0, 6]),
        errors.InputError,
        "packed_attention got the DTensor f32[1, 2, 6@dp, 2] as query, but plain tensors as key",
        "distribute all three on one mesh: distribute_tensor(x, mesh, placements)",
    ),
    "a copy of a computed tensor": Row(
        lambda w: copy.deepcopy(w.leaf.redistribute(placements=[Shard(0), Shard(1)])),
        errors.InputError,
        "deepcopy of f32[6@dp, 4@tp], which is not a leaf: its grad_fn cannot be copied",
        "detach it first: copy.deepcopy(x.detach())",
    ),
    "saving a Partial": Row(
        lambda w: w.partial.__create_write_items__("x", w.partial),
        errors.PlacementError,
        "f32[6, 4] sum(dp) cannot be saved or loaded while it is Partial: no rank holds its values",
        "redistribute it first, e.g. x.redistribute(placements=[Replicate(), ...])",
    ),
    "loading a Partial": Row(
        lambda w: w.partial.__create_chunk_list__(),
        errors.PlacementError,
        "f32[6, 4] sum(dp) cannot be saved or loaded while it is Partial: no rank holds its values",
        "redistribute it first, e.g. x.redistribute(placements=[Replicate(), ...])",
    ),
}
