"""Networks that read pictures: against transformers, torchmetrics and torch-fidelity, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.functional.multimodal import clip_score

from feature_networks import inception_shapes, save_clip, save_dinov2, save_inception
from sd_lightning import UsageError
from sd_lightning.models.image_features import ImageFeatures, read_image_features
from sd_lightning.models.inception import NUM_WEIGHTS, read_inception

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
    save_inception(path / "inception.pth")
    return path


def read(path: Path) -> ImageFeatures:
    return read_image_features(str(path), device=CPU)


def test_inception_gives_torch_fidelitys_features(folder: Path) -> None:
    """Numbers of torch-fidelity's FeatureExtractorInceptionV3 (commit of 2025) with the same weights and pictures."""
    features = read(folder / "inception.pth")
    found = features.images(pictures())
    assert found.shape == (2, features.num_features) and features.num_features == 2048
    expected = [
        [0.40496701, 0.0, 0.40757626, 0.053562932, 0.080050193],
        [0.42704287, 0.0, 0.44048446, 0.055162966, 0.079061352],
    ]
    np.testing.assert_allclose(found[:, [0, 500, 1000, 1500, 2000]], expected, rtol=1e-4)
    np.testing.assert_allclose(found.mean(1), [0.1124, 0.1208], atol=6e-5)
    assert (features.metric("F"), features.metric("K")) == ("FID", "KID")


def test_inception_has_the_size_that_is_published() -> None:
    """21 785 568 without classes: Keras counts 21 802 784, with running statistics and without scales."""
    shapes = inception_shapes().values()
    convolutions, channels = sum(int(np.prod(shape)) for shape in shapes), sum(shape[0] for shape in shapes)
    assert convolutions + 2 * channels == NUM_WEIGHTS and convolutions + 3 * channels == 21_802_784


def test_pictures_are_resized_as_clean_fid_does(folder: Path) -> None:
    """Bicubic with antialiasing on floats: each channel by PIL's mode F, clipped to 0 to 255."""
    network = read(folder / "inception.pth")
    small = pictures()[0].resize((70, 50))
    channels = [Image.fromarray(np.asarray(small)[..., i].astype(np.float32)) for i in range(3)]
    planes = [np.asarray(each.resize((299, 299), Image.Resampling.BICUBIC)).clip(0, 255) for each in channels]
    expected = (torch.from_numpy(np.stack(planes)) - 128) / 128
    assert torch.equal(network.prepare([small])[0], expected)


def test_clip_gives_its_embeddings_and_torchmetrics_score(folder: Path) -> None:
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    features = read(folder / "clip")
    model, processor = CLIPModel.from_pretrained(folder / "clip"), AutoImageProcessor.from_pretrained(folder / "clip")
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
        out = model(**processor(folder / "dinov2")(pictures(), return_tensors="pt"))
    torch.testing.assert_close(features.images(pictures()), out.last_hidden_state[:, 0].double())
    assert (features.metric("F"), features.tokenizer) == ("FD-DINOv2", None)


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
    (tmp_path / "text.txt").write_text("no weights")
    save_inception(tmp_path / "torchvision.pth", classes=1000)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    refused = {
        "half": "its files lack weights, such as ",
        "empty": "gives no features of pictures: ",
        "missing/clip-model": "gives no features of pictures: ",
        "text.txt": "cannot be read as weights",
        "torchvision.pth": "one of 1000 classes; expected FID's Inception",
        "other.pth": "holds another network",
    }
    for name, message in refused.items():
        given = name if "/" in name else str(tmp_path / name)
        with pytest.raises(UsageError, match="features=.*(write|give) ") as error:
            read_image_features(given, device=CPU)
        assert message in str(error.value), name


def test_inception_is_read_from_safetensors_too(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(torch.load(folder / "inception.pth", weights_only=True), tmp_path / "inception.safetensors")
    pixels = torch.rand(1, 3, 299, 299)
    with torch.no_grad():
        same = read_inception(tmp_path / "inception.safetensors")(pixels)
        assert torch.equal(same, read_inception(folder / "inception.pth")(pixels))


@pytest.mark.gpu
def test_features_on_a_gpu_are_those_of_the_cpu(folder: Path, gpu_accelerator: str) -> None:
    for name in ("clip", "dinov2", "inception.pth"):
        there = read_image_features(str(folder / name), device=torch.device(gpu_accelerator))
        found, expected = there.images(pictures()), read(folder / name).images(pictures())
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
        assert found.device.type == "cpu"
    captions = ["a handwritten three", "the digit seven"]
    clip = read_image_features(str(folder / "clip"), device=torch.device(gpu_accelerator))
    expected = read(folder / "clip").caption_scores(found := clip.images(pictures()), captions)
    torch.testing.assert_close(clip.caption_scores(found, captions), expected, rtol=5e-3, atol=0.1)
