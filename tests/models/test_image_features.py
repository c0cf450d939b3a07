"""Networks that read pictures: against transformers, torchmetrics and torch-fidelity, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.functional.multimodal import clip_score

import inception_check
from feature_networks import save_clip, save_dinov2, save_siglip
from sd_lightning import UsageError
from sd_lightning.models.image_features import ImageFeatures, read_image_features

CPU = torch.device("cpu")
Y, X = np.mgrid[:299, :299]
PATTERN = np.stack([X * 255 // 298, Y * 255 // 298, (X // 20 + Y // 20) % 2 * 255], -1).astype(np.uint8)
"""Gradients in red and green, a chessboard in blue."""


def pictures() -> list[Image.Image]:
    return [Image.fromarray(PATTERN), Image.fromarray(PATTERN[::-1, :, ::-1].copy())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks")
    save_clip(path / "clip")
    save_dinov2(path / "dinov2")
    return path


def read(path: Path) -> ImageFeatures:
    return read_image_features(str(path), device=CPU)


def test_inception_gives_the_features_of_torchmetrics_fid(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, inception_check.__file__, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_inception_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(UsageError, match=r"features=inception: .*pip install 'sd-lightning\[fid\]'"):
        read_image_features("inception", device=CPU)


def test_clip_gives_its_embeddings_and_torchmetrics_score(folder: Path) -> None:
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    features = read(folder / "clip")
    model, processor = CLIPModel.from_pretrained(folder / "clip"), AutoImageProcessor.from_pretrained
    processor = processor(folder / "clip", backend="pil")
    with torch.no_grad():
        expected = model.get_image_features(**processor(pictures(), return_tensors="pt")).pooler_output
    found = features.images(pictures())
    torch.testing.assert_close(found, expected.double())
    assert (features.metric("F"), features.metric("K"), features.num_features) == ("FD-CLIP", "KD-CLIP", 16)

    class Tensors:
        """What torchmetrics expects of a CLIP: tensors, as transformers 4 returned them."""

        config, to = model.config, lambda self, device: self
        get_image_features = staticmethod(lambda pixels: model.get_image_features(pixels).pooler_output)
        get_text_features = staticmethod(lambda ids, mask: model.get_text_features(ids, mask).pooler_output)

    tokenizer = AutoTokenizer.from_pretrained(folder / "clip")

    def process(images: list[torch.Tensor] | None = None, text: list[str] | None = None, **options: object) -> object:
        return processor(images, return_tensors="pt") if text is None else tokenizer(text, **options)  # type: ignore[arg-type]

    captions = ["a handwritten three", "the digit seven, drawn with many more words than it needs, by far too many"]
    scores = features.caption_scores(found, captions)
    for image, caption, score in zip(pictures(), captions, scores):
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        with torch.no_grad():
            theirs = clip_score(pixels, caption, lambda: (Tensors(), process))  # type: ignore[arg-type, return-value]
        assert float(theirs) == pytest.approx(max(float(score), 0), abs=1e-4)
    assert abs(float(scores[0])) > 1


def test_dinov2_gives_its_class_token(folder: Path) -> None:
    from transformers import AutoImageProcessor, Dinov2Model

    features = read(folder / "dinov2")
    model, processor = Dinov2Model.from_pretrained(folder / "dinov2"), AutoImageProcessor.from_pretrained
    with torch.no_grad():
        out = model(**processor(folder / "dinov2", backend="pil")(pictures(), return_tensors="pt"))
    torch.testing.assert_close(features.images(pictures()), out.last_hidden_state[:, 0].double())
    assert (features.metric("F"), features.tokenizer) == ("FD-DINOv2", None)


def test_siglip_gives_scores_of_its_own(tmp_path: Path) -> None:
    """Its captions are padded to the full length, without a mask, as it was trained."""
    from transformers import AutoTokenizer, SiglipModel

    features = read(save_siglip(tmp_path / "siglip"))
    model, tokenizer = SiglipModel.from_pretrained(tmp_path / "siglip"), AutoTokenizer.from_pretrained
    ids = tokenizer(tmp_path / "siglip")(["the digit seven"], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model.get_text_features(ids).pooler_output[0]
    found = features.images(pictures()[:1])
    scores = features.caption_scores(found, ["the digit seven"])
    torch.testing.assert_close(scores[0], 100 * torch.cosine_similarity(found[0], expected.double(), 0))
    assert (ids.shape, features.name) == ((1, 8), "SigLIP")


def test_what_is_no_feature_network_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_dinov2(tmp_path / "half")
    weights = load_file(tmp_path / "half" / "model.safetensors")
    save_file(
        {key: each for key, each in weights.items() if "layer.1" not in key},
        tmp_path / "half" / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "empty").mkdir()
    settings = json.loads((save_clip(tmp_path / "unbounded") / "tokenizer_config.json").read_text())
    settings.pop("model_max_length")
    (tmp_path / "unbounded/tokenizer_config.json").write_text(json.dumps(settings))
    refused = {
        "half": "its files lack weights, such as ",
        "unbounded": "gives no features of pictures: ",
        "empty": "gives no features of pictures: ",
        "missing/clip-model": "gives no features of pictures: ",
    }
    for name, message in refused.items():
        given = name if "/" in name else str(tmp_path / name)
        with pytest.raises(UsageError, match="features=.*(write|give) ") as error:
            read_image_features(given, device=CPU)
        assert message in str(error.value), name
        assert ("HF_HUB_OFFLINE" in str(error.value)) == ("/" in name), "a folder needs no hub"


@pytest.mark.gpu
def test_features_on_a_gpu_are_those_of_the_cpu(folder: Path, gpu_accelerator: str) -> None:
    for name in ("clip", "dinov2"):
        there = read_image_features(str(folder / name), device=torch.device(gpu_accelerator))
        found, expected = there.images(pictures()), read(folder / name).images(pictures())
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
        assert found.device.type == "cpu"
    captions = ["a handwritten three", "the digit seven"]
    clip = read_image_features(str(folder / "clip"), device=torch.device(gpu_accelerator))
    expected = read(folder / "clip").caption_scores(found := clip.images(pictures()), captions)
    torch.testing.assert_close(clip.caption_scores(found, captions), expected, rtol=5e-3, atol=0.1)
