"""What is known about an op, as one value.

>>> Op("aten::mm", "m k, k n -> m n ; linear 0 | 1")
Op('aten::mm', 'm k, k n -> m n ; linear 0 | 1')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from .._torch.ops import OpOverload
from ..notation import Rule
from ..sharding.layout import Layout
from .call import Call, Kwargs
from .kernel import Kernel, KernelRun, LocalCall, LocalResult

Source = str | Rule | Callable[[Call], str | Rule | None]
"""A rule, or a function that returns the rule of a call: None to run this call on gathered inputs, or by other ops."""

Function = Callable[..., Any]
"""A function of an op's arguments."""


@dataclass(frozen=True)
class Never:
    """The rule of an op that has one for no call, for this reason. A generated rule is not asked either.

    >>> define("aten::masked_select", Never("the shape of the result depends on data"))
    """

    reason: str

    def __call__(self, call: Call) -> None:
        """Return None: no call has a rule."""


Write = Callable[[Tensor, Tensor], Tensor]
"""`(root, new value of the view) -> new value of the root`."""

Put = Callable[[Kwargs], Write]
"""From the arguments of a view op, by name, to the function that writes a new value of the view into its root."""

Override = Callable[[OpOverload], Callable[..., object]]
"""From an overload to the kernel that takes its place above autograd: `kernel(keys, *args, **kwargs)`. For calls that
it leaves to PyTorch, the kernel returns `call_original(func, keys, *args, **kwargs)` (`call_with_autograd` if the op
has a derivative of its own), or NotImplemented if the record says `makes_tensors`."""


Strides = Literal[
    "elementwise",
    "elementwise reversed",
    "indexed",
    "rolled",
    "row-major",
    "row-major if complex",
    "channels last",
    "channels last of input",
    "batch norm",
    "batch norm backward",
    "convolution",
    "as run",
]
"""The memory order of an op's results (`dispatch/result_strides.py`):

    elementwise             as TensorIterator orders the operands
    elementwise reversed    as TensorIterator orders the operands from last to first
    indexed                 as indexing orders the table and the indices
    rolled                  as `cat` orders the slices of which a roll consists
    row-major               always row-major
    row-major if complex    row-major for complex operands, else as the meta kernel says
    channels last           channels last if the operand is, else row-major
    channels last of input  channels last if the second operand is: a gradient follows the input
    batch norm              channels last if the input is, which depends on its gaps
    batch norm backward     the same for input and incoming gradient together
    convolution             channels last if the input or the weight is
    as run                  found by running the op on zeros
"""


class Local(NamedTuple):
    """An implementation of an op on local shards, for calls in which no sharded factor has a kernel.

    `when` says which of these calls need it: "always", only those that leave a "partial sum" in a result, or only those
    in which some rank has an "empty shard"; in the others the op itself runs. `copies` marks a view op whose
    implementation returns a copy.
    """

    run: Callable[[LocalCall], LocalResult]
    when: Literal["always", "partial sum", "empty shard"] = "always"
    copies: bool = False


class ListKernel(NamedTuple):
    """A kernel for lists of tensors: `run(call, shard)`, where list arguments hold the tensors that are sharded alike.

    It may return a dict from the names of plain tensor arguments to their new values, the same on all ranks. With
    `all_ranks` all ranks of the mesh take part, whatever is sharded.
    """

    run: Callable[..., KernelRun]
    all_ranks: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """One op. `name` is that of one overload (`aten::add.Tensor`) or of all (`aten::add`).

    In-place, `out=`, scalar and foreach variants follow from the schema (see `resolve`) and need no record.

    >>> resolve(torch.ops.aten.mm.default).op
    Op('aten::mm', 'm k, k n -> m n ; linear 0 | 1')
    """

    name: str
    rule: Source | None = None
    """None: the op has no handwritten rule. It has a generated one, is decomposed, or runs on gathered inputs."""
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    """For each factor that the rule's `kernel` clause names: how the op runs when that factor is sharded."""
    layout_rule: Callable[[Call, Sequence[Layout]], str | None] | None = None
    """A rule that serves calls whose operands have certain layouts; `rule` serves those for which it returns None."""
    local: Local | None = None
    draw: Callable[[LocalCall], LocalResult] | None = None
    """For ops that draw random numbers, like `local`; the argument `generator` is a `Draw` that all ranks share."""
    list_kernel: ListKernel | None = None
    """For ops on lists of tensors that communicate once for a list."""
    decomposition: Function | None = None
    """A function of the op's arguments that calls other ops, for calls that no rule takes. It may return
    NotImplemented. Variants do not inherit it."""
    updates: tuple[str, ...] = ()
    """Arguments that the decomposition writes although the schema does not say so: the statistics of a batch norm."""
    python: Function | None = None
    """The op in Python, for local tensors: quicker than the overload. Variants do not inherit it."""
    put: Put | None = None
    """For view ops: how a write to the view reaches the tensor it views. Variants do not inherit it."""
    override: Override | None = None
    """What runs on distributed tensors instead of the op, above autograd."""

    cpu_dtypes: Callable[[Call], Sequence[torch.dtype]] | None = None
    """The dtypes of the results on the CPU, where the meta kernel returns those of other devices."""
    gradient_of: str | None = None
    """The argument whose gradient the result is. The op does not read it, and the rule does not mention it. Autograd
    redistributes the gradient to the layout of this argument, and the choice of a plan counts that cost."""
    reads_numbers: bool = False
    """The rule, or the decomposition, reads the values of numbers (the p of a norm): each value has its own plan."""
    reads_shape_only: bool = False
    """The op reads the shape of its operand, not its values: a Partial operand need not be reduced."""
    addresses_storage: bool = False
    """The op takes an offset into the storage of its operand, which may be a view that begins elsewhere."""
    returns_shard: bool = False
    """The op returns the local shard of its operand, as a plain tensor."""
    keeps_sizes: bool = False
    """Results have the sizes of the operands' dims, though the rule has a kernel or a size argument."""
    takes_plain: bool = False
    """The decomposition takes plain tensors and tensors of several meshes besides distributed ones: it looks at shapes
    alone, or its answer is the same on all ranks whatever a plain tensor holds on each."""
    strides: Strides | None = None
    """How the op lays out its results, where its meta kernel says otherwise."""
    masks_results: bool = False
    """Results that `output_mask` does not request are None, though the meta kernel returns tensors."""
    takes_empty: bool = False
    """The op is called on empty shards, too, because what it returns there does not follow from metadata."""
    makes_tensors: bool = False
    """PyTorch decomposes the op, and on the way makes plain tensors from sizes and numbers alone. They are the same on
    all ranks, so they are taken as replicated."""
    derivative_makes_tensors: bool = False
    """As `makes_tensors`, for the op's derivative formula: cumprod's fills in ones, slice_scatter's returns zeros."""
    batch_rule_makes_tensors: bool = False
    """As `makes_tensors`, for vmap's batching rule: for a batch of tables, embedding's adds a range to the indices."""

    origin: Literal["built in", "user", "generated", "elementwise"] = "built in"
    file: str = field(default="", compare=False)
    """Where it was defined, relative to the package."""

    def __repr__(self) -> str:
        rule = "a function of the call" if callable(self.rule) and not isinstance(self.rule, Rule) else str(self.rule)
        return f"Op({self.name!r}, {rule!r})"


class Facts(TypedDict, total=False):
    """The fields of `Op` that a definition may give besides the op's name and rule."""

    layout_rule: Callable[[Call, Sequence[Layout]], str | None]
    kernels: Mapping[str, Kernel]
    local: Local
    draw: Callable[[LocalCall], LocalResult]
    list_kernel: ListKernel
    decomposition: Function
    updates: tuple[str, ...]
    python: Function
    put: Put
    override: Override
    cpu_dtypes: Callable[[Call], Sequence[torch.dtype]]
    gradient_of: str
    reads_numbers: bool
    reads_shape_only: bool
    addresses_storage: bool
    returns_shard: bool
    keeps_sizes: bool
    takes_plain: bool
    strides: Strides
    masks_results: bool
    takes_empty: bool
    makes_tensors: bool
    derivative_makes_tensors: bool
    batch_rule_makes_tensors: bool


FACTS_OF_ANY_RULE = (
    "draw",
    "updates",
    "override",
    "cpu_dtypes",
    "gradient_of",
    "reads_numbers",
    "addresses_storage",
    "returns_shard",
    "takes_plain",
    "strides",
    "masks_results",
    "takes_empty",
    "makes_tensors",
    "derivative_makes_tensors",
    "batch_rule_makes_tensors",
)
"""What holds of an op with any rule: a user's rule does not change it."""
