"""Names that public JAX modules had once and have no longer.

Made by comparing the public names of jax 0.2.21, 0.3.17, 0.4.14, 0.4.30, 0.5.3, 0.6.2, 0.7.2,
0.8.0, 0.9.0 and 0.11.0, read from their sources, with what 0.10.2 and 0.12.0.1 offer when
asked. `REMOVED[module][version]` lists the names missing for the first time in that version of
the list; "0.3" and "0.4" mean "by 0.4.14" and "by 0.4.30". A module that is gone takes all it
held with it and is listed under its parent. A test compares every name with the running JAX.
"""

REMOVED: dict[str, dict[str, str]] = {
    "jax": {
        "0.3": """
            ad_util api custom_ivjp custom_transforms defjvp defvjp invertible lazy mask
            partial shapecheck tree_multimap
        """,
        "0.4": """
            ShapedArray abstract_arrays curry flatten_fun_nokwargs jaxpr_util linear_util prng
            pxla soft_pmap xla
        """,
        "0.5": "clear_backends xla_computation",
        "0.6": """
            spmd_mode tree_flatten tree_leaves tree_map tree_structure tree_transpose
            tree_unflatten treedef_is_leaf
        """,
        "0.8": "util",
        "0.9": "ArrayRef array_ref",
        "0.10": """
            custom_transpose device_put_replicated device_put_sharded
            enable_custom_vjp_by_custom_transpose
        """,
        "0.11": "cloud_tpu_init",
    },
    "jax.config": {
        "0.4": "config",
    },
    "jax.core": {
        "0.3": """
            AbstractUnit PrettyPrint Unit cache check_call check_map convert_element_type_p
            dropvar partialmethod pp_eqn_compact process_env_traces typecheck_assert vcat
        """,
        "0.4": """
            AbstractBInt AvalMapHandlerPair AxisEnvFrame AxisPrimitive AxisSubst BInt
            BIntDimensionHandler Bot ClosedCallPrimitive CustomPpEqnRule DBIdx DConcreteArray
            DimSize DimensionHandler DuplicateAxisNameError FLAGS HashableFunction
            HashableWrapper PaddedArray Shape TracerArrayConversionError
            TracerIntegerConversionError UnexpectedTracerError UnitVar abstract_unit
            as_hashable_function aval_eltype aval_has_custom_eltype aval_method aval_property
            axis_substitution_rules bot call_bind canonicalize_dim collections config curry
            custom_eltypes diff_dim diff_shape dilate_dim dilate_shape divide_shape_sizes
            dtypes eltype eval_jaxpr_eqn extract_call_jaxpr greater_equal_dim
            greater_equal_shape has_custom_eltype has_opaque_dtype initial_to_final_param_rules
            is_custom_eltype is_empty_shape is_opaque_dtype is_special_dim_size jax_config
            jax_jit lib lu map named_call_p namedtuple ordered_effects partial pp prod ref
            safe_map safe_zip same_referent same_shape_sizes source_info_util stride_dim
            stride_shape sum_dim sum_shapes symbolic_equal_one_of_dim symbolic_equal_shape
            token total_ordering traceback_util tuple_delete tuple_insert unit unitvar
            unsafe_map unsafe_zip weakref_lru_cache zip
        """,
        "0.5": """
            ConcreteArray JaxprDebugInfo MainTrace NameGatheringSubst NamedShape Sublevel
            ThreadLocalState TraceStack TraceState apply_todos as_named_shape
            call_bind_with_continuation canonicalize_shape check_eqn check_type
            check_valid_jaxtype cur_sublevel definitely_equal dimension_as_value
            do_subst_axis_names_jaxpr extend_axis_env jaxpr_uses_outfeed join_named_shapes
            map_bind map_bind_with_continuation new_base_main new_main new_sublevel
            non_negative_dim outfeed_primitives pp_aval pp_eqn pp_eqn_rules pp_eqns pp_jaxpr
            pp_jaxpr_eqn_range pp_jaxpr_skeleton pp_jaxprs pp_kv_pair pp_kv_pairs pp_var
            pp_vars primitive_uses_outfeed process_env_traces_call process_env_traces_map
            raise_as_much_as_possible stash_axis_env subst_axis_names subst_axis_names_eqn
            subst_axis_names_jaxpr subst_axis_names_var symbolic_equal_dim thread_local_state
            used_axis_names
        """,
        "0.6": """
            AxisSize ClosedJaxpr EvalTrace InDBIdx InputType Jaxpr JaxprEqn Literal
            MapPrimitive OpaqueTraceState OutDBIdx Primitive TRACER_LEAK_DEBUGGER_WARNING Token
            Var concrete_aval dedup_referents escaped_tracer_error extend_axis_env_nd
            full_lower get_referent jaxpr_as_fun join_effects lattice_join leaked_tracer_error
            maybe_find_leaked_tracers raise_to_shaped raise_to_shaped_mappings
            reset_trace_state str_eqn_compact substitute_vars_in_output_ty typecompat
            used_axis_names_jaxpr
        """,
        "0.7": """
            AxisName ConcretizationTypeError axis_frame call_p closed_call_p get_type
            trace_state_clean typecheck typematch
        """,
        "0.9": "DShapedArray UnshapedArray",
        "0.10": """
            AbstractToken TraceTag call_impl get_aval mapped_aval set_current_trace subjaxprs
            take_current_trace traverse_jaxpr_params unmapped_aval
        """,
        "0.11": """
            CallPrimitive DebugInfo DropVar Effect Effects InconclusiveDimensionOperation
            JaxprPpContext JaxprPpSettings JaxprTypeError OutputType abstract_token
            aval_mapping_handlers call check_jaxpr concrete_or_error
            concretization_function_error custom_typechecks find_top_trace gensym
            get_opaque_trace_state is_concrete is_constant_dim is_constant_shape
            jaxprs_in_params literalable_types new_jaxpr_eqn no_axis_name no_effects
            nonempty_axis_env_DO_NOT_USE primal_dtype_to_tangent_dtype trace_ctx
            unsafe_am_i_under_a_jit_DO_NOT_USE unsafe_am_i_under_a_vmap_DO_NOT_USE
            unsafe_get_axis_names_DO_NOT_USE valid_jaxtype
        """,
    },
    "jax.custom_derivatives": {
        "0.6": "custom_vjp_call_jaxpr_p",
        "0.8": "custom_jvp_call_jaxpr_p",
    },
    "jax.dlpack": {
        "0.7": "to_dlpack",
        "0.8": "SUPPORTED_DTYPES",
    },
    "jax.errors": {
        "0.8": "SimplifiedTraceback",
    },
    "jax.experimental": {
        "0.3": "djax loops optimizers sharded_jit stax with_sharding_constraint",
        "0.4": "PartitionSpec array callback gda_serialization global_device_array sharding",
        "0.5": "array_api export maps",
        "0.7": "attrs shard",
        "0.8": "host_callback",
        "0.9": "MutableArray disable_x64 enable_x64 mutable_array saved_input_vjp si_vjp",
        "0.10": "custom_dce x64_context",
        "0.12": "control_deps cur_qdd shard_alike",
    },
    "jax.experimental.compilation_cache.compilation_cache": {
        "0.8": "initialize_cache is_initialized",
    },
    "jax.experimental.layout": {
        "0.7": "DeviceLocalLayout",
    },
    "jax.experimental.multihost_utils": {
        "0.4": "GlobalDeviceArray",
    },
    "jax.experimental.pjit": {
        "0.4": """
            FROM_GDA MeshPspecSharding ParsedPartitionSpec PartitionSpec REPLICATED SpecSync
            with_sharding_constraint
        """,
        "0.7": "pjit_p",
        "0.10": "AUTO",
    },
    "jax.extend": {
        "0.8": "ffi",
    },
    "jax.extend.backend": {
        "0.7": "add_clear_backends_callback",
    },
    "jax.extend.core": {
        "0.12": "CallPrimitive call_impl",
    },
    "jax.interpreters": {
        "0.3": "invertible_ad masking sharded_jit",
    },
    "jax.interpreters.ad": {
        "0.3": "ignore_consts remat_transpose",
        "0.4": """
            Literal Partial Primitive Trace Tracer as_hashable_function call_p config core
            dtype flatten_fun flatten_fun_nokwargs float0 get_aval identity
            instantiate_zeros_aval lu map partition_list pe raise_to_shaped
            register_pytree_node safe_map safe_zip source_info_util split_list tree_flatten
            tree_unflatten unzip2 weakref_lru_cache wrap_name zip
        """,
        "0.5": """
            CustomJVPException CustomVJPException recast_to_float0 replace_float0s
            zeros_like_jaxval
        """,
        "0.7": "backward_pass_internal unpair_pval",
        "0.9": """
            bilinear_transpose call_param_updaters call_transpose call_transpose_param_updaters
            closed_backward_pass custom_lin_p defjvp_zero f_jvp_traceable jvp_subtrace
            jvp_subtrace_aux jvpfun linear_jvp linear_transpose linear_transpose2 map_transpose
            nonzero_outputs nonzero_tangent_outputs rearrange_binders standard_jvp
            standard_jvp2 traceable vjp zero_jvp zeros_like_p
        """,
        "0.10": "reducing_transposes",
    },
    "jax.interpreters.batching": {
        "0.3": "AxesSpec BatchDim BatchDims batch_subtrace_instantiate batchfun xla",
        "0.4": """
            Trace Tracer add_batched add_jaxvals add_jaxvals_p as_hashable_function
            canonicalize_axis config core curry lu map memoize pe raise_to_shaped safe_map
            safe_zip source_info_util split_list tree_flatten tree_unflatten unzip2 unzip3
            weakref_lru_cache wrap_name zeros_like_batched zeros_like_jaxval zeros_like_p
        """,
        "0.5": "spmd_axis_primitive_batchers",
        "0.7": "Zero",
        "0.9": """
            Array AxisSize BatchTrace BatchTracer BatchingRule Elt FromEltHandler GetIdx
            IndexedAxisSize Jumble JumbleAxis JumbleTy MakeIotaHandler MapSpec RaggedAxis
            ToEltHandler Vmappable ZeroIfMapped Zeros batch batch_custom_jvp_subtrace
            batch_custom_vjp_bwd batch_jaxpr batch_jaxpr2 broadcast_batcher
            flatten_fun_for_vmap from_elt from_elt_handlers is_vmappable jumble_axis make_iota
            make_iota_handlers matchaxis moveaxis reducer_batcher spec_types to_elt
            to_elt_handlers vectorized_batcher vmappables vtile
        """,
        "0.10": "NotMapped not_mapped",
    },
    "jax.interpreters.partial_eval": {
        "0.3": """
            abstract_unit cache count_outputs dropvar partial_eval_to_jaxpr_dynamic
            partial_eval_wrapper remat_call remat_call_p unit unitvar
        """,
        "0.4": """
            AbstractBInt AbstractValue Atom AvalId ClosedJaxpr ConcreteArray ConstId DBIdx
            DShapedArray DimensionHandlerTracer DropVar InDBIdx InputType JaxprEqn Literal
            OrderedSet OutDBIdx OutputType Primitive PyTreeDef ShapedArray Trace Tracer Var
            WrapperForWeakRef Zero api_util arg_info_flattened arg_info_pytree
            as_hashable_function core dtypes flatten_fun_nokwargs flattened_fun_in_tree
            fun_sourceinfo get_aval get_referent identity lu map mapped_aval merge_lists
            new_jaxpr_eqn partial_eval_jaxpr partition_list profiler raise_to_shaped safe_map
            safe_zip source_info_util split_list toposort trace_to_subjaxpr_dynamic2_memoized
            tree_leaves tree_unflatten treedef_tuple unmapped_aval unsafe_map unsafe_zip unzip2
            weakref_lru_cache zip
        """,
        "0.5": """
            DebugInfo arg_info_all debug_info debug_info_final extend_jaxpr_stack result_info
            sig_info trace_to_jaxpr trace_to_jaxpr_final trace_to_jaxpr_final2
            trace_to_subjaxpr trace_to_subjaxpr_dynamic trace_to_subjaxpr_dynamic2
            trace_to_subjaxpr_nounits_dyn
        """,
        "0.6": "trivial_ctx",
        "0.9": """
            AbstractedAxesSpec AbstractedAxisName BoundedAxisSize Const ConstFoldRule ConstVar
            DCERule DynamicJaxprTrace ForwardingRule FreeVar Jaxpr JaxprEqnRecipe
            JaxprStackFrame JaxprTrace JaxprTracerRecipe LambdaBinding ParamsUpdater
            PartialEvalCustomResult PartialEvalCustomRule ResAvalUpdater TracerAsName TracerId
            call_padding_rule call_param_updaters call_partial_eval_custom_rule
            call_partial_eval_rules closed_call_partial_eval_custom_rule config
            const_fold_rules convert_envvars_to_constvars convert_invars_to_constvars
            custom_staging_rules def_trivial_padding forwarding_rules has_effects
            infer_lambda_input_type instantiate_const_at make_jaxpr_effects
            move_binders_to_front pad_jaxpr padding_rules partial_eval_jaxpr_custom
            partial_eval_jaxpr_custom_rule_not_implemented partial_eval_wrapper_nounits
            partition_pvals recipe_to_eqn trace_to_jaxpr_dynamic2 trace_to_subjaxpr_nounits
            trace_to_subjaxpr_nounits_fwd tracers_to_jaxpr
        """,
    },
    "jax.interpreters.pxla": {
        "0.3": """
            array_result_handler aval_to_result_handler avals_to_results_handler
            execute_replicated extend_name_stack pxla_result_handlers xops
        """,
        "0.4": """
            AUTO ArrayMappingOrAutoOrUnspecified AvalDimSharding ConcreteArray DynamicAxisEnv
            DynamicAxisEnvFrame EMPTY_ENV EmapInfo ExecuteReplicated InputsHandler
            InputsHandlerMode JAXTypeError MapTrace Mesh MeshDimAssignment OpShardingType
            OrderedDictType OutputType ParallelCallableInfo PartitionInfo PartitionSpec
            PartitionsOrReplicated PmapComputation PxlaResultHandler ReplicaInfo
            ResourceAxisName ResourceEnv ResultsHandler SPMDBatchTrace ShapedArray ShardInfo
            ShardedDeviceArray ShardedDeviceArrayBase TileManual TileVectorize TilingMethod
            UnloadedMeshExecutable UnloadedPmapExecutable WeakRefList abstract_arrays ad
            api_util array_types assert_unreachable batching can_execute_with_token
            check_multihost_collective_allowlist config core custom_resource_typing_rules
            device_array device_put dispatch distributed_debug_log dtypes find_partitions
            find_replicas full_to_shard_p get_global_aval get_local_aval get_num_partitions
            identity ir local_aval_to_result_handler local_avals_to_results_handler
            local_result_handlers lower_mesh_computation lower_parallel_callable
            lower_sharding_computation lu make_sharded_device_array map maybe_cached_property
            maybe_extend_axis_env mesh_sharding_specs mhlo mlir
            multi_host_supported_collectives new_mesh_sharding_specs new_name_stack
            partition_list partitioned_sharding_spec pe pmap_lib prod profiler
            reconcile_num_partitions replicate resource_typecheck safe_map safe_zip
            sda_array_result_handler shard_arg shard_arg_handlers shard_aval
            shard_aval_handlers shard_to_full_p sharding_spec_sharding_proto show_axes
            source_info_util split_dict spmd_primitive_batchers stage_parallel_callable stages
            tile_aval_nd tree_flatten tree_map tuple_delete tuple_insert unsafe_map
            untile_aval_nd unzip2 unzip3 util vtile_by_mesh vtile_manual wrap_name xb xc xe xla
            xla_extension_version xla_pmap xla_pmap_impl xla_pmap_impl_lazy
        """,
        "0.7": "are_op_shardings_equal is_op_sharding_replicated",
        "0.10": """
            Chunked MapTracer NoSharding PmapExecutable Replicated ShardedAxis ShardingSpec
            Unstacked parallel_callable shard_args spec_to_indices xla_pmap_p
        """,
        "0.11": """
            ArrayMapping Index MeshAxisName MeshExecutable are_hlo_shardings_equal
            array_mapping_to_axis_resources global_aval_to_result_handler
            global_result_handlers is_hlo_sharding_replicated op_sharding_to_indices
        """,
    },
    "jax.interpreters.xla": {
        "0.3": """
            AbstractToken ArgSpec DeletedBuffer DeviceArrayProtocol Literal Token
            UnexpectedTracerError XlaCompiledComputation XlaComputation XlaComputationBuilder
            abstract_token ad_util add_jaxvals_translation_rule apply_outfeed_rewriter arg_spec
            array_result_handler aval_to_result_handler cache call_translations
            check_backend_params check_special compile_or_get_cached deleted_buffer
            device_array_supports_weakrefs device_put_handlers device_put_p eqn_replicas
            flatten_shape initial_style_primitive_replicas initial_style_translations
            jaxpr_has_pmap jaxpr_literals jaxpr_replicas jaxpr_subcomp jaxpr_uses_outfeed
            lower_fun_initial_style lower_xla_callable lu masking needs_check_special
            outfeed_primitives outfeed_rewriter parallel_translations partialmethod
            pp_eqn_compact prefetch primitive_computation primitive_uses_outfeed
            raise_to_shaped set_up_aliases token translations_with_avals type_is_device_array
            unzip2 xla_primitive_callable xla_result_handlers zeros_like_translation_rule
        """,
        "0.4": """
            AxisEnv Buffer ConcreteArray Device DeviceArray MYPY ShapedArray SpatialSharding
            TranslationContext TranslationRule XlaBuilder XlaExecutable XlaOp XlaShape ad
            array_types aval_to_xla_shapes axis_groups axis_read backend_compile
            backend_specific_translations check_backend_matches config core device_array
            device_put dtype_to_primitive_type dtypes extend_axis_env extend_name_stack
            identity jaxpr_collectives lower_fun make_device_array make_op_metadata
            make_shaped_array map new_name_stack parameter partition_list pe pp
            primitive_subcomputation prod register_collective_primitive
            register_initial_style_primitive register_translation safe_map safe_zip
            sharding_to_proto source_info_util str_eqn_compact tracebacks translations
            tuple_sharding_proto unsafe_map unsafe_zip with_sharding with_sharding_proto
            wrap_name xla_call xla_call_p xla_destructure xla_shape_handlers xops zip
        """,
        "0.5": "xb xc xe",
        "0.7": "abstractify pytype_aval_mappings",
        "0.8": "canonicalize_dtype",
    },
    "jax.lax": {
        "0.3": "pgather select_p standard_translate",
        "0.4": """
            dtypes make_bint naryop naryop_dtype_rule prod standard_abstract_eval
            standard_naryop standard_primitive standard_unop tie_in unop unop_dtype_rule
        """,
        "0.5": "pdot scan_bind xeinsum",
        "0.6": "random_gamma_grad_p",
        "0.7": "infeed infeed_p outfeed outfeed_p",
        "0.9": "all_gather_invariant zeros_like_array",
        "0.10": "pvary",
        "0.12": "dce_sink_p",
    },
    "jax.lib": {
        "0.9": "xla_bridge xla_client xla_extension",
    },
    "jax.nn": {
        "0.4": "normalize",
    },
    "jax.numpy": {
        "0.3": "lax_numpy",
        "0.4": """
            DeviceArray NINF NZERO PZERO alltrue cumproduct in1d issubsctype msort product
            row_stack sometrue trapz
        """,
        "0.5": "round_",
        "0.10": "fix",
    },
    "jax.ops": {
        "0.3": "index index_add index_max index_min index_mul index_update",
    },
    "jax.profiler": {
        "0.3": "StepTraceContext TraceContext trace_function",
    },
    "jax.random": {
        "0.4": """
            KeyArray PRNGKeyArray default_prng_impl rbg_key threefry2x32_key threefry2x32_p
            threefry_2x32 unsafe_rbg_key
        """,
        "0.5": "shuffle",
    },
    "jax.scipy.linalg": {
        "0.4": "polar_unitary tril triu",
    },
    "jax.scipy.special": {
        "0.10": "sph_harm",
    },
    "jax.sharding": {
        "0.5": "XLACompatibleSharding",
        "0.7": "GSPMDSharding PositionalSharding use_mesh",
        "0.10": "PmapSharding",
    },
    "jax.stages": {
        "0.7": "OutInfo",
    },
    "jax.tools": {
        "0.3": "jax_to_hlo",
        "0.5": "build_utils",
        "0.10": "colab_tpu",
    },
    "jax.tree_util": {
        "0.3": "tree_multimap",
        "0.4": "AttributeKeyPathEntry GetitemKeyPathEntry register_keypaths",
        "0.7": "build_tree",
    },
}
