"""Models of 8 to 20 billion weights in int8 with `offload=blocks`: memory of the device, and seconds of a step.

Computed without weights and predicted for data sheets, so the figures are the same on every machine.
"""

MODELS = {"flux1": "flux1_dev", "sd35": "sd35_large", "qwen": "qwen_image", "krea2": "krea2"}
GPUS = {"3060": "rtx-3060", "4090": "rtx-4090"}
BARS = {f"{name}_peak_{side}_gb": "<= 4" for name in MODELS for side in (512, 1024)}
TABLE = {
    f"{title} in int8, blocks in host memory: GB of the device at 512²; 1024²": f"{{{name}_peak_512_gb}}; "
    f"{{{name}_peak_1024_gb}}"
    for name, title in zip(MODELS, ("Flux.1-dev", "SD3.5 large", "Qwen-Image", "Krea 2"), strict=True)
}


def measure() -> dict[str, float]:
    """Count, trace and predict on the meta device."""
    from sd_lightning import LatentDiffusion
    from sd_lightning.models.generation import SamplingOptions
    from sd_lightning.planner.calibration import hardware
    from sd_lightning.planner.drawing import drawing_forecast
    from sd_lightning.quantization import Int8, quantize_

    speeds = {short: hardware(gpu)[1] for short, gpu in GPUS.items()}
    found: dict[str, float] = {}
    for name, architecture in MODELS.items():
        model = quantize_(LatentDiffusion.build(architecture, device="meta"), Int8(dtype="bfloat16"))
        for side in (512, 1024):
            options = SamplingOptions(batch_size=1, height=side, width=side)
            for gpu, each in speeds.items():
                forecast = drawing_forecast(model, options, speeds=each, offload="blocks")
                whole = drawing_forecast(model, options, speeds=each)
                assert forecast.step is not None and whole.step is not None and forecast.copying is not None
                found[f"{name}_step_{side}_{gpu}_s"] = forecast.step
                found[f"{name}_resident_step_{side}_{gpu}_s"] = whole.step
                found[f"{name}_copying_{gpu}_s"] = forecast.copying
                found[f"{name}_peak_{side}_gb"] = forecast.peak / 1e9
                found[f"{name}_resident_peak_{side}_gb"] = whole.peak / 1e9
                found[f"{name}_weights_gb"], found[f"{name}_copied_gb"] = forecast.weights / 1e9, forecast.copied / 1e9
    return found
