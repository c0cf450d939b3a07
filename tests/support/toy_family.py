"""A whole family outside the package: a transformer of packed latents, two encoders, a reversed velocity."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, DiffusionPipeline, ImagePipelineOutput, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn

from sd_lightning.models.families import Architecture, Component, Family, Part, architecture
from sd_lightning.models.families.stable_diffusion import CLIP, TOKENIZER


class Toy(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, channels: int = 16, width: int = 32, clip: int = 32, t5: int = 24) -> None:
        super().__init__()
        self.image, self.words, self.more_words, self.time = (nn.Linear(n, width) for n in (channels, clip, t5, 1))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.out = nn.Linear(width, channels)

    def forward(self, tokens: Tensor, time: Tensor, clip: Tensor, t5: Tensor) -> Tensor:
        image = self.image(tokens) + self.time(time[:, None, None])
        hidden = torch.cat([image, self.words(clip), self.more_words(t5)], dim=1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden[:, : tokens.shape[1]])


class ToyPipeline(DiffusionPipeline):
    def __init__(self, transformer, vae, text_encoder, text_encoder_2, tokenizer, tokenizer_2, scheduler) -> None:
        super().__init__()
        self.register_modules(**{name: value for name, value in locals().items() if name not in ("self", "__class__")})

    @torch.no_grad()
    def __call__(self, prompt: list[str], generator: list[torch.Generator], num_inference_steps: int, **_: Any) -> Any:
        family, parts = ToyFamily(), self.components
        known = family.condition(parts, {"input_ids": family.tokenize(parts, prompt)})
        latents = torch.stack([torch.randn(4, 8, 8, generator=each) for each in generator])
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            velocity = family.denoise(self.transformer, latents, t, known)
            latents = self.scheduler.step(velocity, t, latents).prev_sample
        pixels = self.vae.decode(latents / self.vae.config.scaling_factor).sample
        return ImagePipelineOutput(VaeImageProcessor().postprocess(pixels))


class ToyFamily(Family):
    pipeline_class, denoiser, block_classes = "ToyPipeline", "transformer", ("TransformerEncoderLayer",)
    parts = {
        "transformer": Part(__name__, ("Toy",)),
        "vae": Part("diffusers", ("AutoencoderKL",)),
        "text_encoder": CLIP,
        "text_encoder_2": Part("transformers", ("T5EncoderModel",)),
        "tokenizer": TOKENIZER,
        "tokenizer_2": TOKENIZER,
    }
    clip = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8}
    t5 = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 3, "dropout_rate": 0.0}
    networks = {
        "transformer": Component(__name__, "Toy"),
        "vae": architecture("tiny").networks["vae"],
        "text_encoder": Component("transformers", "CLIPTextModel", clip | {"num_hidden_layers": 2}),
        "text_encoder_2": Component("transformers", "T5EncoderModel", t5),
    }
    scheduler = Component("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
    lengths = {"text_encoder": 8, "text_encoder_2": 12}
    architectures = {"toy": Architecture("ToyPipeline", networks, scheduler, max_length=lengths)}

    def resolution(self, components: Mapping[str, Component]) -> int:
        return 32

    def embed(self, text_encoders: Mapping[str, Any], input_ids: Mapping[str, Tensor]) -> dict[str, Any]:
        clip, t5 = (text_encoders[name](ids)[0] for name, ids in input_ids.items())
        return {"clip": clip, "t5": t5}

    def denoise(self, denoiser: Any, noisy_latents: Tensor, timesteps: Tensor, conditioning: Any) -> Tensor:
        count, _, height, width = noisy_latents.shape
        tokens = F.pixel_unshuffle(noisy_latents, 2).flatten(2).mT
        answer = denoiser(tokens, timesteps.expand(count).to(tokens.dtype) / 1000, **conditioning)
        return -F.pixel_shuffle(answer.mT.unflatten(2, (height // 2, width // 2)), 2)

    def pipeline_type(self) -> Any:
        return ToyPipeline
