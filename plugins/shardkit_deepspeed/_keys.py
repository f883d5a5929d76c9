"""The keys of DeepSpeed's JSON configuration, as DeepSpeed 0.19.8 reads them. Read from its source."""

from __future__ import annotations

# Ours to write: the session owns what they say, and a file may only agree.
OWNED = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "gradient_clipping",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "bfloat16",
        "torch_autocast",
        "data_types",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
    }
)

# Handed on as they are: they change what DeepSpeed logs, not what it computes.
PASSED = frozenset(
    {"steps_per_print", "dump_state", "log_level", "memory_breakdown", "comms_logger", "vocabulary_size", "timers"}
)

# Features that shardkit does not drive: to name one is fine, to switch it on is refused.
FEATURES = {
    "activation_checkpointing": "checkpoint in the model itself, with torch.utils.checkpoint",
    "aio": "no tensor is kept on NVMe",
    "autotuning": "run DeepSpeed's own launcher for it",
    "checkpoint": "session.save and session.load write and read checkpoints",
    "comet": "log from the training loop",
    "compile": "compile the model before prepare",
    "csv_monitor": "log from the training loop",
    "data_efficiency": "sample the data in the training loop",
    "data_parallel_size": "every rank is a data-parallel one",
    "dataloader_drop_last": "the data loader is yours",
    "datastates_ckpt": "session.save and session.load write and read checkpoints",
    "disable_allgather": "DeepSpeed reads it and does nothing with it",
    "disable_python_gc": "call gc.disable() yourself",
    "expert_parallel": "experts are not sharded",
    "flops_profiler": "profile with torch.profiler",
    "hybrid_engine": "session.evaluate() generates with whole weights",
    "pipeline": "pipelines are not driven",
    "sequence_parallel_size": "sequences are not sharded",
    "tensor_parallel": "tensors are not split",
    "tensorboard": "log from the training loop",
    "use_data_before_expert_parallelism": "experts are not sharded",
    "wall_clock_breakdown": "profile with torch.profiler",
    "wandb": "log from the training loop",
    "weight_quantization": "weights are not quantized",
}

# Gone in 0.19.8, which refuses them.
REMOVED = frozenset(
    {
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    }
)

TOP_LEVEL = OWNED | PASSED | frozenset(FEATURES) | REMOVED

# Within zero_optimization: option of ours, DeepSpeed's name, and its other name.
ZERO_OPTIONS = {
    "stage": ("stage",),
    "reduce_bucket_size": ("reduce_bucket_size",),
    "allgather_bucket_size": ("allgather_bucket_size",),
    "overlap_comm": ("overlap_comm",),
    "contiguous_gradients": ("contiguous_gradients",),
    "prefetch_bucket_size": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    "persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
    "max_live_parameters": ("stage3_max_live_parameters", "max_live_parameters"),
    "max_reuse_distance": ("stage3_max_reuse_distance", "max_reuse_distance"),
    "sub_group_size": ("sub_group_size",),
}

ZERO_PASSED = frozenset(
    {
        "allgather_partitions",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "model_persistence_threshold",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_model_persistence_threshold",
        "use_multi_rank_bucket_allreduce",
        # About DeepSpeed's own checkpoints, which are not written here.
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    }
)

# Values that leave the feature off, or as it must be; any other is refused.
ZERO_FIXED: dict[str, tuple[object, ...]] = {
    "allgather_sequential": (False,),
    "compute_grad_norm": (True,),
    "cpu_offload": (None, False),
    "cpu_offload_param": (None, False),
    "cpu_offload_use_pin_memory": (None, False),
    "enable_sanity_checks": (False,),
    "leaf_module": (None, {}),
    "legacy_stage1": (False,),
    "module_granularity_threshold": (0,),
    "save_muon_momentum_buffer_in_memory": (False,),
    "stage3_allgather_sequential": (False,),
    "stage3_module_granularity_threshold": (0,),
    "stage3_use_all_reduce_for_fetch_params": (False,),
    "use_all_reduce_for_fetch_params": (False,),
    "zenflow": (None,),
    "zero_hpz_partition_size": (0, 1),
    "zero_quantized_gradients": (False,),
    "zero_quantized_nontrainable_weights": (False,),
    "zero_quantized_weights": (False,),
}

ZERO_REMOVED = frozenset({"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"})

OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}

ZERO = frozenset(
    {
        *(name for names in ZERO_OPTIONS.values() for name in names),
        *ZERO_PASSED,
        *ZERO_FIXED,
        *ZERO_REMOVED,
        *OFFLOADS.values(),
    }
)

# Within offload_optimizer and offload_param.
OFFLOAD_PASSED = frozenset({"device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path"})
OFFLOAD_FIXED: dict[str, tuple[object, ...]] = {
    "cpuadam_cores_perc": (0.8,),
    "fast_init": (False,),
    "pipeline": (False,),
    "pipeline_read": (False,),
    "pipeline_write": (False,),
    "ratio": (1, 1.0),
    "super_offload": (False,),
}
