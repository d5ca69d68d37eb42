"""Where each name of `torch.distributed.tensor` and its submodules lives in shardwise.

The names are the public ones, and the private ones that programs outside PyTorch, or other parts of PyTorch, import.
`MODULES` lists the modules that exist in this table alone. Modules that have a file of their own (`parallel`, `debug`,
`placement_types`, ...) are found there, and are listed in `FILES`.
"""

from __future__ import annotations

_PLACEMENTS = {"sharding.placement": "Placement Shard Replicate Partial"}
_SPECS = {"sharding.spec": "DTensorSpec TensorMeta", "sharding.placement": "ShardOrder ShardOrderEntry"}
_CONTEXT_PARALLEL = {
    "dropin.attention": "context_parallel context_parallel_unshard set_rotate_method _RotateMethod _cp_options "
    "_LoadBalancer _HeadTailLoadBalancer _context_parallel_shard"
}

MODULES: dict[str, dict[str, str]] = {
    "_api": {
        "tensor.dtensor": "DTensor",
        "tensor.creation": "distribute_tensor ones empty full rand randn zeros",
        "nn": "distribute_module",
        "sharding.mesh": "DeviceMesh",
        "dropin.tensors": "_shard_tensor from_local",
        **_PLACEMENTS,
        "sharding.spec": "DTensorSpec TensorMeta",
    },
    "_collective_utils": {
        "dropin.tensors": "mesh_broadcast mesh_scatter pad_tensor unpad_tensor redistribute_cost shard_dim_alltoall"
    },
    "_dispatch": {"dispatch.dispatcher": "OpDispatcher"},
    "_dtensor_spec": {**_SPECS, "sharding.mesh": "DeviceMesh"},
    "_op_schema": {
        "dropin.strategies": "OpSchema OpSpec OpStrategy TupleStrategy StrategyType RuntimeSchemaInfo OutputSharding "
        "PlacementList ArgsType KwargsType",
        "sharding.spec": "DTensorSpec",
    },
    "_ops": {},
    "_ops.utils": {
        "dropin.strategies": "register_op_strategy replicate_op_strategy expand_to_full_mesh_op_strategy "
        "generate_redistribute_costs",
        "dropin.shapes": "prod normalize_dim normalize_dims is_tensor_shardable is_tensor_evenly_shardable "
        "is_tensor_dim_sharded is_tensor_partial",
    },
    "_ops._pointwise_ops": {"dropin.strategies": "register_inductor_prims"},
    "_random": {
        "random": "manual_seed",
        "dropin.random_state": "is_rng_supported_mesh OffsetBasedRNGTracker _PhiloxState _rng_tracker",
    },
    "_redistribute": {
        "dropin.tensors": "redistribute_local_tensor use_min_cost_redistribution_plan "
        "disable_redistribute_transform_optimization _get_flattened_mesh_by_layout_impl"
    },
    "_sharding_prop": {"dropin.strategies": "ShardingPropagator"},
    "_shards_wrapper": {},
    "_utils": {
        "dropin.shapes": "compute_local_shape_and_global_offset _compute_local_shape_and_global_offset "
        "compute_local_shape compute_local_stride compute_local_tensor_info compute_global_tensor_info "
        "compute_global_tensor_shape normalize_to_torch_size try_find_mesh_from_args",
        "dropin.tensors": "ExplicitRedistributionContext",
    },
    "debug._comm_mode": {"debug": "CommDebugMode"},
    "debug._visualize_sharding": {"debug": "visualize_sharding"},
    "experimental._attention": _CONTEXT_PARALLEL,
    "experimental._context_parallel": _CONTEXT_PARALLEL,
    "experimental._context_parallel._attention": _CONTEXT_PARALLEL,
    "experimental._func_map": {"extend": "local_map", "dropin.tensors": "_local_map_wrapped"},
    "experimental._register_sharding": {"extend": "register_sharding"},
    "parallel._data_parallel_utils": {"dropin.data_parallel": "_flatten_tensor _unflatten_tensor"},
    "parallel.api": {"parallel": "parallelize_module"},
    "parallel.ddp": {"dropin.data_parallel": "_pre_dp_module_transform _localize_dtensor _reconstruct_dtensor"},
    "parallel.fsdp": {"dropin.data_parallel": "DTensorExtensions"},
    "parallel.input_reshard": {"dropin.data_parallel": "input_reshard"},
    "parallel.style": {
        "parallel": "ParallelStyle ColwiseParallel RowwiseParallel SequenceParallel PrepareModuleInput "
        "PrepareModuleInputOutput PrepareModuleOutput",
        **_PLACEMENTS,
        "tensor.dtensor": "DTensor",
        "tensor.creation": "distribute_tensor",
        "nn": "distribute_module",
    },
}

FILES = ("debug", "device_mesh", "experimental", "parallel", "parallel.loss", "placement_types")
"""The modules of `torch.distributed.tensor` that are files of shardwise."""


def names_of(module: str) -> dict[str, str]:
    """For each name of a module of the table, the module of shardwise that it lives in."""
    return {name: home for home, names in MODULES[module].items() for name in names.split()}
