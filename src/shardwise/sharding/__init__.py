"""How a tensor is sharded, as pure values; mesh information, and the runtime of a world.

placement         Shard, Replicate, Partial, InterleavedShard, OrderedShard, P
layout            which elements each rank holds, as arithmetic
from_placements   placements to layouts and back
normalize         placements as users write them, checked and in one form
memory_order      strides, and the order of dims in memory
dtypes            dtypes in which a sum is the same
spec              mesh, layout and metadata of a tensor, in one interned value; as text: `spec_text`, `spec_parse`
mesh              axes, coordinates and groups of a DeviceMesh
base              the base class of DTensor
drawn             drawings in notebooks
runtime           everything that lives as long as one world; its caches: `cache`; the lock for making objects: `once`
observers         hooks for profilers and debug tools; lines of the user's program: `source_lines`
recording         code that a recorded step calls as one op
"""
