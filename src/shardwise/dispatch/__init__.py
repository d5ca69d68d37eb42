"""Dispatch: from an op call on distributed tensors to its result.

hot_path      calls that are known and need no communication
dispatcher    all others: find or make the plan, carry it out
key           the key of a call
arguments     how planning sees arguments, and how a plan treats them
bind_call     the op's rule with the sizes of this call
propagate     which factor each mesh axis shards; its values are in `decision`; rejected choices: `choices`
result_meta   shapes of results; `result_strides` where a meta kernel is wrong about strides
call_plan     the plan of a call, run by `run_call`
list_plan     the plan of an op on lists, run by `run_list`
local_code    what runs on the local shards, made of the parts in `local_call`
local_strides local results with the strides of their specs
view_call     views that are recomputed after a write to their base (`writes`); offsets into a tensor's `storage`
fallback      calls that no rule takes; those whose results do not fit their `out=` tensors: `into_out`
outside       calls on a rank that is not in the mesh
plain         plain tensors among distributed ones; which are replicated: `provenance`, `formulas`
plain_targets distributed values that are written into plain tensors
gather_cache  the last redistributed operand
watch         whether a local shard still holds the data it had; `memory_notes` are stored with its memory
observe       observers of ops, for profilers and debug tools
modes         explicit, implicit_replication, strict_ops; refusing in explicit mode: `explicit`
"""
