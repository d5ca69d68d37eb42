"""DTensor and how it is made.

dtensor           the class
sources           where a local shard comes from: a collective under way, a view that is replayed
autograd          redistribution, from_local and to_local as edges of autograd
leaf_gradient     how the gradient of a leaf is reduced
gradient_buckets  gradients that are reduced together
from_local        the global tensor that local tensors are shards of
local_shapes      the local shapes of all ranks, asked for and checked
creation          distribute_tensor and factories
checkpoint        what torch.distributed.checkpoint asks of a tensor
shown_to_tools    what PyTorch's profiler and its DebugMode show
"""

from . import shown_to_tools as shown_to_tools
