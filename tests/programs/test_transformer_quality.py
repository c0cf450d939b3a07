"""The small transformers learn what their captions ask for; their adapters learn a subject, and digits stay digits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from glyph import SUBJECT, drawn_shares, write_photos

pytestmark = pytest.mark.slow

IN_FULL = pytest.mark.full("quality")
LORA = {
    "tiny_klein": (
        "lora.target_modules=[to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,to_qkv_mlp_proj]",
        "learning_rate=3e-3",
        "max_train_steps=300",
    ),
    "tiny_z_image": (
        "lora.target_modules=[to_q,to_k,to_v,to_out.0,w1,w2,w3]",
        "learning_rate=1e-3",
        "max_train_steps=150",
    ),
    "tiny_sd3": (
        "lora.target_modules=[to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,net.0.proj,net.2]",
        "learning_rate=2e-3",
        "max_train_steps=200",
    ),
    "tiny_flux": (
        "lora.target_modules=[attn.to_q,attn.to_k,attn.to_v,attn.to_out.0,attn.add_q_proj,attn.add_k_proj,"
        "attn.add_v_proj,attn.to_add_out,net.0.proj,net.2,proj_mlp,single_transformer_blocks.*.proj_out]",
        "learning_rate=3e-3",
        "max_train_steps=300",
    ),
    "tiny_qwen_image": (
        "lora.target_modules=[to_q,to_k,to_v,to_out.0,add_k_proj,add_v_proj,net.0.proj,net.2]",
        "learning_rate=3e-3",
        "max_train_steps=300",
    ),
    "tiny_qwen_image_21": (
        "lora.target_modules=[to_q,to_k,to_v,to_out.0,img_mlp.proj,img_mlp.gate_layer,img_mlp.out]",
        "learning_rate=1e-3",
        "max_train_steps=100",
    ),
    "tiny_krea2": (
        "lora.target_modules=[to_q,to_k,to_v,to_out.0,to_gate,ff.gate,ff.up,ff.down]",
        "learning_rate=3e-3",
        "max_train_steps=90",
    ),
}
"""Adapters on all linear layers of attention, and on those of the perceptrons beside it."""


@pytest.mark.parametrize(
    ("model", "seed"),
    [
        pytest.param("tiny_klein", 0, id="klein", marks=IN_FULL),
        pytest.param("tiny_klein", 1, id="klein, seed 1", marks=IN_FULL),
        pytest.param("tiny_flux", 0, id="Flux.1", marks=IN_FULL),
        pytest.param("tiny_flux", 1, id="Flux.1, seed 1", marks=IN_FULL),
        pytest.param("tiny_sd3", 0, id="Stable Diffusion 3.5", marks=IN_FULL),
        pytest.param("tiny_sd3", 1, id="Stable Diffusion 3.5, seed 1", marks=IN_FULL),
        pytest.param("tiny_z_image", 0, id="Z-Image", marks=IN_FULL),
        pytest.param("tiny_z_image", 1, id="Z-Image, seed 1", marks=IN_FULL),
        pytest.param("tiny_qwen_image", 0, id="Qwen-Image", marks=IN_FULL),
        pytest.param("tiny_qwen_image_21", 0, id="Qwen-Image 2.1", marks=IN_FULL),
        pytest.param("tiny_krea2", 0, id="Krea 2", marks=IN_FULL),
    ],
)
def test_digits_are_learned_with_the_defaults_and_a_subject_with_adapters(
    model: str, seed: int, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    digits, subject = tmp_path / "digits", tmp_path / "subject"
    common = (f"model={model}", f"seed={seed}", "callbacks.samples.every_n_steps=0", "logger=csv")
    run_python("-m", "sd_lightning.train", f"output_dir={digits}", *common, timeout=1800, check=True)
    summary = json.loads((digits / "summary.json").read_text())
    assert summary["prompted_accuracy"] >= 0.95 and summary["caption_gap"] >= 0.1, summary

    lora = ("experiment=dreambooth_tiny", "trainable=lora", "lora.rank=16", *LORA[model])
    data = (f"instance_data_dir={write_photos(tmp_path / 'photos')}", f"instance_prompt={SUBJECT}")
    start = (f"init_from={digits}", f"output_dir={subject}", "train_text_encoder=false")
    run_python("-m", "sd_lightning.dreambooth", *common, *lora, *data, *start, timeout=1800, check=True)
    guidance = OmegaConf.load(subject / "config.yaml").sampling.guidance_scale
    found = drawn_shares(subject, guidance_scale=guidance)
    assert found["subject"] >= 0.95, found
    assert found["digits"] >= 0.90, found
    assert found["generic is the subject"] <= 0.10, found
    assert found["kinds of generic"] >= 5, found
