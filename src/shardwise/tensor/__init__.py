"""DTensor and how it is made.

dtensor           the class; methods by subject: `global_values`, `pieces` (split), `changed_shape` (t_), `hooks`
sources           local shards that are not available yet: a collective in flight, a view that is replayed
autograd          redistribution, from_local and to_local as autograd functions
leaf_gradient     how the gradient of a leaf is reduced
gradient_buckets  gradients that are reduced together
from_local        the spec of the global tensor that local tensors are shards of; under torch.func: `transformed`
local_shapes      the local shapes of all ranks, exchanged and checked
handed_out        local shards that the user holds, and writes to them
other_mesh        the spec of a tensor on another mesh
creation          distribute_tensor and factories
flat              flattening for torch.compile
exported          ops for torch.export
checkpoint        the chunks that torch.distributed.checkpoint saves and loads
saved             tensors that torch.load reads
shown_to_tools    what PyTorch's profiler and its DebugMode show
"""

from . import shown_to_tools as shown_to_tools
