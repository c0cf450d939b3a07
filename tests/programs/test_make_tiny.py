"""The script that made the shipped files of the `tiny` models still makes them.

The whole training of the VAEs would give the shipped weights, up to the order of sums; here it is cut short, as it
takes longer than a test should.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import make_tiny
from glyph import GLYPH, GlyphJudge, glyphs
from places import PACKAGE
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.transform import place, to_model_range
from sd_lightning.models.families import architecture

SHIPPED = PACKAGE / "models" / "assets" / "tiny"


@pytest.mark.full("quality")
def test_the_tokenizer_is_the_shipped_one_and_the_vae_learns_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLQwenImage21

    monkeypatch.setattr(make_tiny, "_STEPS", 50)
    make_tiny.main(tmp_path)
    names = sorted(path.relative_to(SHIPPED) for path in SHIPPED.rglob("*.*"))
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")) == names
    tokenizer = ("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
    assert [_json(tmp_path / name) for name in tokenizer] == [_json(SHIPPED / name) for name in tokenizer]
    configs = [_json(folder / "vae/config.json") for folder in (tmp_path, SHIPPED)]
    assert configs[0] | {"scaling_factor": configs[1]["scaling_factor"]} == configs[1]

    made, shipped = (AutoencoderKL.from_pretrained(folder / "vae") for folder in (tmp_path, SHIPPED))
    shapes = [{name: tensor.shape for name, tensor in vae.state_dict().items()} for vae in (made, shipped)]
    assert shapes[0] == shapes[1]
    digits = Digits("train")
    images = _images([digits.image(i) for i in range(256)])
    for vae, share in ((made, 0.2), (shipped, 0.02)):
        with torch.no_grad():
            posterior = vae.encode(images).latent_dist
            latents = posterior.sample(generator=torch.Generator().manual_seed(0)) * vae.config.scaling_factor
            error = (vae.decode(posterior.mean).sample - images).square().mean()
        assert error < share * images.var()
        assert latents.square().mean().sqrt() == pytest.approx(1.0, abs=0.03)  # what scaling_factor is for

    config = _json(SHIPPED / "film_vae/config.json")
    known = architecture("tiny_qwen_image").networks["vae"].config
    own = {key: config[key] for key in ("latents_mean", "latents_std")}
    assert known | own == known and _json(tmp_path / "film_vae/config.json") | own == config
    for folder, share in ((tmp_path, 0.4), (SHIPPED, 0.02)):
        vae: Any = AutoencoderKLQwenImage.from_pretrained(folder / "film_vae")
        with torch.no_grad():
            error = (vae.decode(vae.encode(images.unsqueeze(2)).latent_dist.mode()).sample.squeeze(2) - images).square()
        assert error.mean() < share * images.var()

    rgba = torch.cat([images, torch.ones_like(images[:, :1])], dim=1).unsqueeze(2)
    assert _json(tmp_path / "rgba_vae/config.json") == _json(SHIPPED / "rgba_vae/config.json")
    for folder, share in ((tmp_path, 0.4), (SHIPPED, 0.025)):
        vae = AutoencoderKLQwenImage21.from_pretrained(folder / "rgba_vae")
        with torch.no_grad():
            posterior = vae.encode(rgba).latent_dist
            error = (vae.decode(posterior.mean).sample - rgba)[:, :3].square().mean()
        assert error < share * images.var()
        latents = posterior.sample(generator=torch.Generator().manual_seed(0))
        assert latents.square().mean().sqrt() == pytest.approx(1.0, abs=0.05)


def test_the_vae_of_four_tokens_passes_digits_and_a_glyph_that_it_was_not_trained_on() -> None:
    from diffusers import AutoencoderKLQwenImage21

    drawn, digits = glyphs(100, seed=2), Digits("val")
    seen = [F.normalize(each[:, 0].flatten(1) + 1) for each in (_images(drawn), make_tiny.drawn_strokes(1437))]
    assert (seen[0] @ seen[1].T).max() < 0.85 < (seen[0] @ seen[0].T).sort().values[:, -2].min()

    vae: Any = AutoencoderKLQwenImage21.from_pretrained(SHIPPED / "rgba_vae")
    images = _images([*drawn, *(digits.image(i) for i in range(100))])
    with torch.no_grad():
        posterior = vae.encode(F.pad(images, (0, 0, 0, 0, 0, 1), value=1.0).unsqueeze(2)).latent_dist
        decoded = vae.decode(posterior.mean).sample[:, :3, 0].clamp(-1, 1)
    pixels = ((decoded + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    read = GlyphJudge()([Image.fromarray(each) for each in pixels])
    assert (read[:100] == GLYPH).mean() >= 0.95
    assert (read[100:] == digits.labels[:100]).mean() >= 0.95


def _images(pictures: list[Image.Image]) -> torch.Tensor:
    return to_model_range(torch.stack([torch.from_numpy(place(each, (32, 32)).pixels.copy()) for each in pictures]))


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
