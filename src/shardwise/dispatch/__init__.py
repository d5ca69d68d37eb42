"""Dispatch: from an op call on distributed tensors to its result.

hot_path      calls that are known and need no communication
dispatcher    all others: find or make the plan, carry it out
key           the key of a call
arguments     how planning sees arguments, and how a plan treats them
bind_call     the op's rule with the sizes of this call
propagate     which factor each mesh axis shards; its values are in `decision`
result_meta   shapes of results; `result_strides` where a meta kernel is wrong about strides
call_plan     the plan of a call, run by `run_call`
list_plan     the plan of an op on lists, run by `run_list`
local_code    what runs on the local shards, made of the parts in `local_call`
local_strides local results that lie in memory as their specs say
view_call     views that are made again, and `writes` to what they view; offsets into a tensor's `storage`
fallback      calls that no rule takes
outside       calls on a rank that is not in the mesh
plain         plain tensors among distributed ones; which are replicated: `provenance`, `formulas`
plain_targets distributed values that are written into plain tensors
gather_cache  the last redistributed operand
watch         whether a local shard still holds the data it had
modes         explicit, implicit_replication, strict_ops; refusing in explicit mode: `explicit`
"""
