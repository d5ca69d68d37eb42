"""How a tensor is sharded, as pure values; mesh information, and the runtime of a world.

placement         Shard, Replicate, Partial, InterleavedShard, OrderedShard, P
layout            which elements each rank holds, as arithmetic
from_placements   placements to layouts and back
normalize         placements as users write them, in one form
memory_order      strides, and the order of dims in memory
spec              mesh, layout and metadata of a tensor, in one interned value; as text: `spec_text`
mesh              what is known of a DeviceMesh
base              the base class of DTensor
runtime           everything that lives as long as one world; its caches: `cache`; making one of a kind: `once`
"""
