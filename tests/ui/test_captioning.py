"""Captions by a model of transformers that the user names."""

from pathlib import Path

import pytest

from sd_lightning import UsageError
from sd_lightning.ui import photos


def tiny_blip(folder: Path) -> str:
    """Write a BLIP model of a few thousand random weights; return its folder."""
    import torch
    from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "a", "photo", "of", "glyph"]
    (folder / "vocab.txt").write_text("\n".join(words))
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": len(words), "bos_token_id": 5, "pad_token_id": 0, "eos_token_id": 3, "sep_token_id": 3}
    text = {**size, **ids, "encoder_hidden_size": 16, "projection_dim": 8}
    torch.manual_seed(0)
    config = BlipConfig(text_config=text, vision_config={**size, "image_size": 16, "patch_size": 8}, projection_dim=8)
    BlipForConditionalGeneration(config).save_pretrained(folder)
    pictures = BlipImageProcessor(size={"height": 16, "width": 16})
    BlipProcessor(pictures, BertTokenizer(str(folder / "vocab.txt"))).save_pretrained(folder)
    return str(folder)


def test_photos_without_a_caption_get_one(tmp_path: Path) -> None:
    photos.add_examples(tmp_path / "photos", 2)
    photos.write_caption(tmp_path / "photos", "photo-0001.png", "mine")
    photos.caption_all(tmp_path / "photos", tiny_blip(tmp_path / "blip"))
    (_, mine), (_, made) = photos.photos(tmp_path / "photos")
    assert mine == "mine" and made and set(made.split()) <= {"[DEC]", "a", "photo", "of", "glyph"}
    with pytest.raises(UsageError, match="caption_model=.*expected a folder with a model of transformers"):
        photos.caption_all(tmp_path / "photos", str(tmp_path / "photos"))
