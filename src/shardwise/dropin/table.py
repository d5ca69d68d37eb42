"""Where each name of `torch.distributed.tensor` and its submodules lives in shardwise.

The names are the public ones, and the private ones that programs outside PyTorch, or other parts of PyTorch, import.
`MODULES` lists the modules that exist in this table alone. Modules that have a file of their own (`parallel`, `debug`,
`placement_types`, ...) are found there, and are listed in `FILES`.

Names of the home `NO_COUNTERPART` belong to PyTorch's implementation alone. They can be imported, so that a program
that imports them beside others starts; whatever uses one gets an error that says so.
"""

from __future__ import annotations

NO_COUNTERPART = "(none)"

_PLACEMENTS = {"sharding.placement": "Placement Shard Replicate Partial"}
_SPECS = {"sharding.spec": "DTensorSpec TensorMeta", "sharding.placement": "ShardOrder ShardOrderEntry"}
_CONTEXT_PARALLEL = {
    "dropin.attention": "context_parallel context_parallel_unshard set_rotate_method _RotateMethod _cp_options "
    "_context_parallel_shard _enable_context_parallel_dispatcher "
    "_disable_context_parallel_dispatcher",
    "dropin.attention_style": "_ContextParallel",
    "dropin.load_balancers": "_LoadBalancer _HeadTailLoadBalancer _PerDocumentHeadTailLoadBalancer",
    NO_COUNTERPART: "_CausalBehavior _is_causal_behavior _PTRRLoadBalancer",
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
    "_decompositions": {NO_COUNTERPART: "DecompShardingStrategy"},
    "_ops": {},
    "_ops._common_rules": {NO_COUNTERPART: "einop_rule pointwise_rule"},
    "_ops._einsum_strategy": {NO_COUNTERPART: "EinsumDims gen_einsum_strategies"},
    "_ops._math_ops": {
        NO_COUNTERPART: "_NormPartial max_min_dim_single_dim_strategy layer_norm_single_dim_strategy "
        "layer_norm_bwd_single_dim_strategy rms_norm_single_dim_strategy rms_norm_bwd_single_dim_strategy"
    },
    "_ops._matrix_ops": {
        NO_COUNTERPART: "mm_strategy addmm_strategy bmm_strategy mm_single_dim_strategy "
        "gen_single_dim_einsum_strategies constant_pad_nd_single_dim_strategy _scaled_mm_scale_placement"
    },
    "_ops._tensor_ops": {NO_COUNTERPART: "cat_single_dim_strategy"},
    "_ops._view_ops": {
        NO_COUNTERPART: "_ViewShardingPropagator Broadcast Flatten InputDim Repeat Singleton Split dim_maps "
        "propagate_shape_and_sharding view_groups"
    },
    "_ops.single_dim_strategy": {
        NO_COUNTERPART: "register_single_dim_strategy _ShardingPlaceholder _SingleDimStrategyInfo "
        "_PreparedSingleDimStrategy _dijkstra_expand_single_dim_strategy_to_mesh _expand_single_dim_strategy_to_mesh "
        "_fill_single_dim_strategy_placeholders _get_num_tensor_inputs _get_unique_placements "
        "_insert_single_dim_replication_strategy"
    },
    "_ops.strategy_validation": {
        NO_COUNTERPART: "ComparisonStats compare_operator extract_tensors_from_sample get_opinfo_by_name "
        "get_1d_input_placements_for_tensor get_1d_output_placements_for_tensor is_fully_replicated is_trivial_shard "
        "normalize_combo_key normalize_placement normalize_placement_str parse_placement query_single_dim_strategy "
        "resolve_op_names validate_aten_combination validate_combination _checkerboard_mask _compare_rules "
        "_create_partial_input _extract_rules_from_op_strategy _find_opinfo_candidates"
    },
    "_ops.utils": {
        "dropin.strategies": "register_op_strategy replicate_op_strategy expand_to_full_mesh_op_strategy "
        "generate_redistribute_costs",
        "dropin.shapes": "prod normalize_dim normalize_dims is_tensor_shardable is_tensor_evenly_shardable "
        "is_tensor_dim_sharded is_tensor_partial",
    },
    "_ops._pointwise_ops": {
        "dropin.strategies": "register_inductor_prims",
        NO_COUNTERPART: "_BINARY_ADDITIVE_RULES _MUL_RULES _UNARY_LINEAR_RULES _common_pointwise_single_dim_strategy",
    },
    "_random": {
        "random": "manual_seed",
        "dropin.random_state": "is_rng_supported_mesh OffsetBasedRNGTracker _PhiloxState _rng_tracker",
    },
    "_redistribute": {
        "dropin.tensors": "redistribute_local_tensor use_min_cost_redistribution_plan "
        "disable_redistribute_transform_optimization _get_flattened_mesh_by_layout_impl",
        NO_COUNTERPART: "_gen_transform_infos _optimize_transform_infos _FlattenedTransformInfo _TransformInfo",
    },
    "_sharding_prop": {"dropin.strategies": "ShardingPropagator", NO_COUNTERPART: "_select_min_cost_strategy"},
    "_shards_wrapper": {NO_COUNTERPART: "LocalShardsWrapper"},
    "_utils": {
        "dropin.shapes": "compute_local_shape_and_global_offset _compute_local_shape_and_global_offset "
        "compute_local_shape compute_local_stride compute_local_tensor_info compute_global_tensor_info "
        "compute_global_tensor_shape normalize_to_torch_size try_find_mesh_from_args",
        "dropin.tensors": "ExplicitRedistributionContext",
    },
    "debug._comm_mode": {"debug": "CommDebugMode"},
    "debug._op_coverage": {NO_COUNTERPART: "get_inductor_decomp_graphs"},
    "debug._visualize_sharding": {"debug": "visualize_sharding"},
    "experimental._attention": _CONTEXT_PARALLEL,
    "experimental._context_parallel": _CONTEXT_PARALLEL,
    "experimental._context_parallel._attention": _CONTEXT_PARALLEL,
    "experimental._context_parallel._cp_custom_ops": {NO_COUNTERPART: "flex_cp_allgather"},
    "experimental._context_parallel._load_balancer": {
        "dropin.load_balancers": "_LoadBalancer _HeadTailLoadBalancer _PerDocumentHeadTailLoadBalancer"
    },
    "experimental._context_parallel._sharding_rules": {
        NO_COUNTERPART: "register_cp_sharding_rules unregister_cp_sharding_rules"
    },
    "experimental._func_map": {"extend": "local_map", "dropin.tensors": "_local_map_wrapped"},
    "experimental._register_sharding": {"extend": "register_sharding"},
    "experimental._tp_transform": {NO_COUNTERPART: "tensor_parallel_transformation"},
    "parallel._data_parallel_utils": {"dropin.data_parallel": "_flatten_tensor _unflatten_tensor"},
    "parallel.api": {"parallel": "parallelize_module"},
    "parallel.ddp": {"dropin.data_parallel": "_pre_dp_module_transform _localize_dtensor _reconstruct_dtensor"},
    "parallel.fsdp": {"dropin.data_parallel": "DTensorExtensions"},
    "parallel.input_reshard": {"dropin.data_parallel": "input_reshard", NO_COUNTERPART: "_unpack_hook_tp"},
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
    """Return, for each name of a module of the table, the module of shardwise that defines it."""
    return {name: home for home, names in MODULES[module].items() for name in names.split()}
