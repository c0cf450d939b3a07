"""Small networks with random weights that read pictures, as transformers writes them, and FID's Inception."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import torch

from places import PACKAGE

TOKENIZER = PACKAGE / "models/assets/tiny/tokenizer"
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def save_clip(folder: Path, *, num_features: int = 16) -> Path:
    """A CLIP of 32 x 32 pixels, which reads captions with the tiny model's tokenizer."""
    from transformers import CLIPConfig, CLIPModel

    shutil.copytree(TOKENIZER, folder)
    text = {key: _VISION[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    text |= {"num_attention_heads": 2, "vocab_size": 2000, "max_position_embeddings": 16}
    text |= {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(vision_config=_VISION, text_config=text, projection_dim=num_features)).save_pretrained(folder)
    return _with_processor(folder, "CLIPImageProcessor")


def save_siglip(folder: Path) -> Path:
    """A SigLIP of 32 x 32 pixels, whose tokenizer gives no attention mask."""
    from transformers import SiglipConfig, SiglipModel

    shutil.copytree(TOKENIZER, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_input_names": ["input_ids"]}))
    text = {key: _VISION[key] for key in _VISION if key not in ("image_size", "patch_size")}
    torch.manual_seed(0)
    config = SiglipConfig(vision_config=_VISION, text_config=text | {"vocab_size": 2000, "max_position_embeddings": 16})
    SiglipModel(config).save_pretrained(folder)
    return _with_processor(folder, "SiglipImageProcessor")


def save_dinov2(folder: Path) -> Path:
    """A DINOv2 of 32 x 32 pixels."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**_VISION)).save_pretrained(folder)
    return _with_processor(folder, "BitImageProcessor")


def _with_processor(folder: Path, kind: str) -> Path:
    settings = {
        "image_processor_type": kind,
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "resample": 3,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.3, 0.2, 0.25],
    }
    switches = ("do_resize", "do_center_crop", "do_normalize", "do_rescale", "do_convert_rgb")
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | dict.fromkeys(switches, True)))
    return folder


def save_inception(file: Path) -> Path:
    """FID's Inception with random weights, as torch-fidelity's file has them."""
    from torch_fidelity import feature_extractor_inceptionv3 as fidelity

    torch.manual_seed(0)
    with patch.object(fidelity, "load_state_dict_from_url"), patch.object(torch.nn.Module, "load_state_dict"):
        network = fidelity.FeatureExtractorInceptionV3("inception", ["2048"])
    for kernel in (each for each in network.parameters() if each.dim() == 4):
        torch.nn.init.kaiming_normal_(kernel)  # features neither vanish nor explode
    torch.save(network.state_dict(), file)
    return file
