"""sd21 in int8 against fp32 and fp16: weights of UNet, text encoder and VAE, computed peak of a 512 x 512 picture."""

BARS = {"weights_vs_fp32": ">= 3.8", "weights_vs_fp16": ">= 1.9", "peak_gb": "<= 1.8"}
TABLE = {
    "sd21's weights in int8: times smaller than in fp32; in fp16": "{weights_vs_fp32} ×; {weights_vs_fp16} ×",
    "the same with linear layers alone, as in other programs": "{linear_vs_fp32} ×; {linear_vs_fp16} ×",
    "computed peak of sd21 in int8 at 512 x 512; with `vae_tiling=true`": "{peak_gb} GB; {peak_tiled_gb} GB",
    "the same in fp32; fp16": "{peak_fp32_gb} GB; {peak_fp16_gb} GB",
}


def measure() -> dict[str, float]:
    """Count and trace on the meta device: no weights are needed, and the figures are the same on every machine."""
    import torch

    from sd_lightning import LatentDiffusion
    from sd_lightning.planner.inference_memory import inference_bytes
    from sd_lightning.quantization import Int8, quantize_

    model = quantize_(LatentDiffusion.build("sd21", device="meta"), Int8(dtype="float16"))
    side = {"height": 512, "width": 512}
    weights, peak = inference_bytes(model, **side)
    half, full = (inference_bytes(model, **side, dtype=dtype) for dtype in (torch.float16, torch.float32))
    with model.family.decoding_in_tiles(model.vae, True):
        tiled = inference_bytes(model, **side)[1]
    linear = quantize_(LatentDiffusion.build("sd21", device="meta"), Int8(dtype="float16", layers=("linear",)))
    linear_weights = inference_bytes(linear, **side)[0]
    return {
        "weights_vs_fp32": full[0] / weights,
        "weights_vs_fp16": half[0] / weights,
        "linear_vs_fp32": full[0] / linear_weights,
        "linear_vs_fp16": half[0] / linear_weights,
        "peak_gb": peak / 1e9,
        "peak_tiled_gb": tiled / 1e9,
        "peak_fp16_gb": half[1] / 1e9,
        "peak_fp32_gb": full[1] / 1e9,
        "weights_gb": weights / 1e9,
    }
