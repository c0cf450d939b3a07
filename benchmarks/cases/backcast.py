"""Predictions of the planner for runs that others published: memory within 15 % or 25 %, times within 35 %.

Nothing is measured: a ratio is predicted by published. `published.py` has each run, its source, and which of them may
set the planner's constants, and which wait for a model or for something that training here does not do yet.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ladder_forecast import explicit_attention
from published import JUDGES, PUBLISHED, SHOWN, Setup, missing

PREDICTED = {name: published for name, published in PUBLISHED.items() if not missing(published)}
BARS = {
    f"{name}_off_by": f"<= {published.tolerance}" for name, published in PREDICTED.items() if published.half != SHOWN
}
TABLE = {
    "predicted to published memory: NVIDIA tf32, fp16, flash, batch 48; ColossalAI without, with; DreamBooth": (
        "{nvidia_tf32}, {nvidia_fp16}, {nvidia_flash}, {nvidia_batch_48}; {colossalai_baseline}, "
        "{colossalai_optimised}; {diffusers_16gb}"
    ),
    "the same: DreamBooth on a T4, four settings; SimpleTuner SDXL": (
        "{t4_checkpointing}, {t4}, {t4_checkpointing_batch_2}, {t4_batch_2}; {simpletuner}"
    ),
    "predicted to published time: NVIDIA forward, backward; T4, four settings; SimpleTuner SDXL": (
        "{nvidia_forward}, {nvidia_backward}; {t4_checkpointing_step}, {t4_step}, {t4_checkpointing_batch_2_step}, "
        "{t4_batch_2_step}; {simpletuner_step}"
    ),
    "the same: Anyscale encoding; gain by latents from a store at 256², 512²; MosaicML": (
        "{anyscale_encoding}; {anyscale_256}, {anyscale_512}; {mosaicml_step}"
    ),
    "the same: Anyscale's share of encoding in a step; A10G per A100 that encode beside them at 256², 512²": (
        "{anyscale_share}; {anyscale_encoders_256}, {anyscale_encoders_512}"
    ),
    "predicted to about what SimpleTuner says for LoRA: klein 4B, 9B": "{simpletuner_klein_4b}, {simpletuner_klein_9b}",
    "predicted to published, LoRA of Krea 2 in bf16 at 512², 1024², each with batches of 1, 4, 8: memory; time": (
        "{krea_bf16_512_b1}, {krea_bf16_512_b4}, {krea_bf16_512_b8}, "
        "{krea_bf16_1024_b1}, {krea_bf16_1024_b4}, {krea_bf16_1024_b8}; "
        "{krea_bf16_512_b1_step}, {krea_bf16_512_b4_step}, {krea_bf16_512_b8_step}, "
        "{krea_bf16_1024_b1_step}, {krea_bf16_1024_b4_step}, {krea_bf16_1024_b8_step}"
    ),
    "predicted to published, LoRA on int8 weights: Krea 2 in the same order: memory; time": (
        "{krea_int8_512_b1}, {krea_int8_512_b4}, {krea_int8_512_b8}, "
        "{krea_int8_1024_b1}, {krea_int8_1024_b4}, {krea_int8_1024_b8}; "
        "{krea_int8_512_b1_step}, {krea_int8_512_b4_step}, {krea_int8_512_b8_step}, "
        "{krea_int8_1024_b1_step}, {krea_int8_1024_b4_step}, {krea_int8_1024_b8_step}"
    ),
    "the same: Z-Image on an H100, an L40S: memory; time; to the size of OneTrainer's card: klein 9B, Z-Image": (
        "{z_image_int8_h100}, {z_image_int8_l40s}; {z_image_int8_h100_step}, {z_image_int8_l40s_step}; "
        "{onetrainer_klein_9b_lora_16gb}, {onetrainer_z_image_lora_16gb}"
    ),
    "predicted to what SimpleTuner says of Flux.1 on NF4 weights at 512², 1024²: time": (
        "{simpletuner_flux1_512_step}, {simpletuner_flux1_1024_step}"
    ),
    "errors of those that judge: memory of NVIDIA; of others": (
        "{nvidia_fp16_off_by}, {nvidia_batch_48_off_by}; {colossalai_baseline_off_by}, "
        "{colossalai_optimised_off_by}, {diffusers_16gb_off_by}, {t4_off_by}, {t4_checkpointing_batch_2_off_by}"
    ),
    "errors of those that judge: Krea 2, memory; times": (
        "{krea_bf16_512_b4_off_by}, {krea_bf16_1024_b1_off_by}, {krea_bf16_1024_b8_off_by}; "
        "{krea_bf16_512_b4_step_off_by}, {krea_bf16_1024_b1_step_off_by}, {krea_bf16_1024_b8_step_off_by}"
    ),
    "errors of those that judge: Krea 2 on int8 weights, memory; times; Z-Image": (
        "{krea_int8_512_b4_off_by}, {krea_int8_1024_b1_off_by}, {krea_int8_1024_b8_off_by}; "
        "{krea_int8_512_b4_step_off_by}, {krea_int8_1024_b1_step_off_by}, {krea_int8_1024_b8_step_off_by}; "
        "{z_image_int8_l40s_off_by}, {z_image_int8_l40s_step_off_by}"
    ),
    "errors of those that judge: times": (
        "{nvidia_backward_off_by}, {t4_step_off_by}, {t4_checkpointing_batch_2_step_off_by}, "
        "{simpletuner_step_off_by}, {anyscale_256_off_by}"
    ),
}


def measure() -> dict[str, float]:
    """Predict every figure."""
    metrics: dict[str, float] = {}
    for name, published in PREDICTED.items():
        found = predicted(published.setup, published.what)
        metrics[name] = found / published.figure
        metrics[f"{name}_off_by"] = abs(found / published.figure - 1)
    judged = [metrics[f"{name}_off_by"] / each.tolerance for name, each in PREDICTED.items() if each.half == JUDGES]
    metrics["judged"] = len(judged)
    metrics["judged_within"] = sum(each <= 1 for each in judged)
    return metrics


def predicted(setup: Setup, what: str) -> float:
    """Return a figure of a run, in bytes or seconds."""
    from sd_lightning.planner.forecast import Forecaster

    with explicit_attention() if setup.explicit_attention else nullcontext():
        model, plan = _planned(setup)
        if what == "allocated":
            return plan.memory.device
        if what == "reserved":
            segments = Forecaster(model, plan.run).segments(plan.footprint)
            return plan.memory.device_phase.nbytes + segments.most - segments.live
        if what == "without_encoding":
            return plan.time.total / _planned(replace(setup, run={**setup.run, "encodes": False}))[1].time.total
        if what == "encoding_share":
            return plan.time.encoding / plan.time.total
        if what == "encoders":
            return _encoders_per_trainer(setup, model)
        return plan.time.total if what == "step" else float(getattr(plan.time, what))


def _encoders_per_trainer(setup: Setup, model: Any) -> float:
    """Return how many A10G it takes beside each trainer, as `sd_lightning.plan` answers it, but not rounded up."""
    from sd_lightning.models.encoder import images_per_call
    from sd_lightning.planner.calibration import hardware
    from sd_lightning.planner.search import Search

    trained = _planned(replace(setup, run={**setup.run, "encodes": False}))[1]
    search = Search(model, trained.run, trained.cluster, [])
    count = images_per_call(setup.resolution, setup.resolution)
    seconds = search.seconds_to_encode(hardware("a10g")[1], count)
    return trained.images_per_second * seconds / setup.gpus


def _planned(setup: Setup) -> tuple[Any, Any]:
    """Return the model and the plan."""
    import torch
    from bitsandbytes.optim import AdamW8bit

    from sd_lightning import LatentDiffusion
    from sd_lightning.models.lora import Lora
    from sd_lightning.planner import plan
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.strategies import presets

    options = dict(setup.run)
    if setup.lora_rank:
        options["lora"] = Lora(setup.lora_rank, base=setup.base)
    if "encoder_dtype" in options:
        options["encoder_dtype"] = getattr(torch, options["encoder_dtype"])
    if setup.adam_8bit:
        options["optimizer"] = AdamW8bit
    run = TrainingRun(setup.batch_size, setup.resolution, setup.precision, world_size=setup.gpus, **options)
    model = LatentDiffusion.build(setup.model, device="meta")  # new: traces are remembered by model
    found = plan(
        model,
        setup.gpu,
        setup.gpus,
        run=run,
        host_memory=2**50,
        micro_batches=[setup.batch_size],
        checkpointing=setup.checkpointing,
        candidates=[next(each for each in presets.candidates() if each.name == setup.strategy)],
        tf32=setup.tf32,
    )
    (only,) = found.best or found.too_large
    return model, only
