"""Bytes of model state of each strategy against its closed form, on two gloo processes."""

from sd_lightning.planner.state_bytes import FORMS

from torchrun import torchrun

WORLD_SIZE = 2
# The closed forms leave out buffers, and a few per cent of padding; ZeRO-1 holds whole gradients only until its step.
BARS = {f"{name}_over_form": "<= 1.08" for name in FORMS if name not in ("single", "fsdp_offload")}
BARS["deepspeed_zero2_offload_over_form"] = "<= 1.15"  # its buffers on the host are of several parameters' size

TABLE = {
    "bytes of model state to the closed forms: DDP; FSDP2; ZeRO-2; ZeRO-3; Gemini; ZeRO-2 offload": (
        "{ddp_over_form}; {fsdp_over_form}; {deepspeed_zero2_over_form}; {deepspeed_zero3_over_form}; "
        "{gemini_over_form}; {deepspeed_zero2_offload_over_form}"
    ),
    "bytes per weight at the step of ZeRO-1; ZeRO-2, on two processes": (
        "{deepspeed_zero1_bytes_per_parameter}; {deepspeed_zero2_bytes_per_parameter}"
    ),
}


def measure() -> dict[str, float]:
    """Bytes per trained parameter at the optimizer's step; on the CPU device and host are one memory."""
    metrics = {}
    for name, measured in torchrun("model_state.py", WORLD_SIZE).items():
        form = FORMS[name]
        metrics[f"{name}_bytes_per_parameter"] = measured
        metrics[f"{name}_over_form"] = measured / (form.whole + (form.sharded + form.host) / WORLD_SIZE)
    return metrics
