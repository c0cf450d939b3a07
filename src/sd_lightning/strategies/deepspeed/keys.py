"""Tables of DeepSpeed's configuration: keys, their old and mistaken names, and unsupported features."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

MOVED = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    "zero_optimization.stage3_max_reuse_parameters": "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload_use_pin_memory": "zero_optimization.offload_optimizer.pin_memory",
}
"""Key of an old release, or of an example that never worked -> its current name."""

WITHOUT_EFFECT = {
    "activation_checkpointing.partition_activations": "it divides activations over the ranks of a model-parallel group",
    "activation_checkpointing.contiguous_memory_optimization": "it belongs to partition_activations",
    "activation_checkpointing.number_checkpoints": "it belongs to partition_activations",
    "activation_checkpointing.synchronize_checkpoint_boundary": "blocks are checkpointed by torch",
    "activation_checkpointing.profile": "blocks are checkpointed by torch",
    "checkpoint": "checkpoints are sd_lightning's own",
    "vocabulary_size": "nothing reads it",
    "dataloader_drop_last": "data are sd_lightning's own",
}
"""Harmless keys that have no effect here -> the reason."""

KEYS: dict[str, frozenset[str]] = {
    "": frozenset(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer "
        "scheduler fp16 bf16 zero_optimization activation_checkpointing aio data_types communication_data_type "
        "prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state disable_allgather disable_python_gc "
        "flops_profiler comms_logger tensorboard wandb csv_monitor comet timers log_level".split()
    ),
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
    "activation_checkpointing": frozenset({"cpu_checkpointing"}),
    "aio": frozenset(
        {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"}
    ),
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
}
"""Known keys by section; DeepSpeed itself gives those of other sections."""
SECTIONS = (
    *KEYS,
    *("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "fp16", "bf16"),
)
"""Sections whose keys are checked."""

GONE = "DeepSpeed has no such feature any more"
_STATE = "EMA, portable checkpoints and sampling cannot read the training state that it makes"
_ENGINE = "it is another kind of engine than the data-parallel one this strategy drives"
REFUSED: dict[str, tuple[Collection[Any], str]] = {
    "zero_optimization.zero_hpz_partition_size": ((0, 1), _STATE),
    "zero_optimization.zero_quantized_weights": ((False,), _STATE),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _STATE),
    "zero_optimization.zero_quantized_gradients": ((False,), "gradients in 4 bits change the result of a run"),
    "zero_optimization.zenflow": ((None,), _STATE),
    "zero_optimization.elastic_checkpoint": ((False,), _STATE),
    "zero_optimization.legacy_stage1": ((False,), GONE),
    "zero_optimization.parameter_alignment": ((False,), _STATE),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), _STATE),
    "zero_optimization.offload_optimizer.super_offload": ((False,), _STATE),
    "zero_optimization.offload_optimizer.pipeline_read": ((False,), _STATE),
    "zero_optimization.offload_optimizer.pipeline_write": ((False,), _STATE),
    "zero_optimization.offload_param.device": (
        ("none", "cpu"),
        "DeepSpeed rounds weights to half precision on their way to a disk, in float32 runs too; with device=cpu they "
        "take 2 bytes each in host memory",
    ),
    "fp16.fp16_master_weights_and_grads": ((False,), "weights would not be kept in float32"),
    "bf16.bf16_master_weights_and_grads": ((False,), "weights would not be kept in float32"),
    "bf16.bf16_optimizer_states": ((False,), "optimizer states would not be kept in float32"),
    "aio.use_gds": ((False,), _STATE),
    "gradient_allreduce_op": (("mean",), "a loss is a mean over the whole batch here"),
    "managed_gradient_accumulation": ((True,), "trainer.accumulate_grad_batches is the one that accumulates"),
    "torch_autocast.enabled": ((False,), "trainer.precision says what is computed in"),
    "sequence_parallel_size": ((1,), _ENGINE),
    "tensor_parallel": ((), _ENGINE),
    "expert_parallel": ((), _ENGINE),
    "use_data_before_expert_parallelism": ((False,), _ENGINE),
    "pipeline": ((), _ENGINE),
    "hybrid_engine.enabled": ((False,), _ENGINE),
    "weight_quantization": ((), _ENGINE),
    "compile.deepcompile": ((False,), "speed.compile_blocks=true compiles"),
    "autotuning.enabled": ((False,), "it starts runs of its own"),
    "data_efficiency.enabled": ((False,), "data are sd_lightning's own"),
    "datastates_ckpt": ((False,), "checkpoints are sd_lightning's own"),
    "amp.enabled": ((False,), GONE),
    "elasticity.enabled": ((False,), GONE),
    "nebula.enabled": ((False,), GONE),
    "compression_training.enabled": ((False,), GONE),
    "sparse_gradients": ((False,), GONE),
    "curriculum_learning.enabled": ((False,), GONE),
    "progressive_layer_drop.enabled": ((False,), GONE),
    "eigenvalue.enabled": ((False,), GONE),
}
"""Path of a feature that cannot work here -> the accepted values, which switch it off, and the reason."""
