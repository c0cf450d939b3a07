"""A new word: one row of an embedding that is trained, and nothing else of it."""

from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import small_training
from glyph import write_photos
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.apps import hub
from sd_lightning.data.builders import dreambooth_data
from sd_lightning.models.families import Architecture
from sd_lightning.models.learned_token import WEIGHTS_NAME, LearnedEmbedding, LearnedToken
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.lora import Lora
from small_models import SMALL_SDXL


def embedding(model: LatentDiffusion) -> LearnedEmbedding:
    found = model.networks["text_encoder"].get_input_embeddings()  # type: ignore[operator]
    assert isinstance(found, LearnedEmbedding)
    return found


def test_a_word_begins_with_the_meaning_of_another_and_captions_without_it_mean_what_they_did() -> None:
    plain, model = LatentDiffusion.build("tiny", seed=1), LatentDiffusion.build("tiny", seed=1)
    captions = ["a handwritten two", "a handwritten digit"]
    before = model.tokenize(captions)
    LearnedToken("S*", initializer_token="two").apply_(model)
    assert torch.equal(model.tokenize(captions)["text_encoder"], before["text_encoder"])
    ids = model.tokenize(["a handwritten S*", "a handwritten two"])
    assert ids["text_encoder"][0, 3] == embedding(model).num_embeddings - 1
    ours, theirs = (m.condition(m.text_encoders, {"input_ids": before}) for m in (model, plain))
    assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"])
    new, two = model.condition(model.text_encoders, {"input_ids": ids})["encoder_hidden_states"]
    assert torch.allclose(new, two, atol=1e-6)


@pytest.mark.parametrize("train_text_encoder", [False, True])
def test_only_the_new_row_has_a_gradient(train_text_encoder: bool) -> None:
    module = small_training.module(train_text_encoder=train_text_encoder, learned_token=LearnedToken())
    encoder = module.text_encoder
    trained = [name for name, p in encoder.named_parameters() if p.requires_grad]  # type: ignore[union-attr]
    assert len(trained) == 1 or train_text_encoder
    ids = module.latent_diffusion.tokenize(["a S* digit", "a two"])
    encoder(ids["text_encoder"])[0].square().sum().backward()  # type: ignore[operator]
    gradient = embedding(module.latent_diffusion).weight.grad
    assert gradient is not None and gradient[-1].abs().max() > 0 and not gradient[:-1].any()
    decay = [group.get("weight_decay") for group in module.configure_optimizers().param_groups]  # type: ignore[union-attr]
    assert decay[-1] == 0.0 and decay[0] > 0


def sdxl() -> LatentDiffusion:
    """Return a model whose configuration says, as the published one's, that captions end with token 2."""
    model = LatentDiffusion.build(SMALL_SDXL, seed=1)
    for name, encoder in model.text_encoders.items():
        for holder in (encoder.config, *(m for m in encoder.modules() if "eos_token_id" in vars(m))):
            holder.eos_token_id = 2  # type: ignore[union-attr]
        model.components[name].config["eos_token_id"] = 2
    return model


def test_sdxl_learns_a_word_in_each_encoder_and_pools_where_captions_end() -> None:
    plain, model = sdxl(), sdxl()
    captions = ["a handwritten two", "a two S* digit"]
    sizes = {name: torch.full((1, 2), 32.0) for name in ("original_size", "crop_top_left", "target_size")}
    LearnedToken("S*", initializer_token="two").apply_(model)

    def condition(of: LatentDiffusion, caption: str) -> dict[str, Any]:
        return of.condition(of.text_encoders, {"input_ids": of.tokenize([caption]), **sizes})

    ours, theirs = condition(model, captions[0]), condition(plain, captions[0])
    assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"])
    assert torch.equal(ours["added_cond_kwargs"]["text_embeds"], theirs["added_cond_kwargs"]["text_embeds"])
    new, two = condition(model, captions[1]), condition(model, "a two two digit")
    assert torch.allclose(new["encoder_hidden_states"], two["encoder_hidden_states"], atol=1e-6)
    pooled, expected = new["added_cond_kwargs"]["text_embeds"], two["added_cond_kwargs"]["text_embeds"]
    assert torch.allclose(pooled, expected, atol=1e-6), "of the whole caption, not of what comes before the new word"
    assert all(model.components[name].config["eos_token_id"] != 2 for name in model.text_encoders)


@pytest.mark.parametrize("architecture", ["tiny", SMALL_SDXL], ids=["tiny", "sdxl"])
def test_diffusers_draws_with_the_word_in_the_pipeline_or_in_a_file_beside_the_model(
    architecture: str | Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import DiffusionPipeline

    LatentDiffusion.build(architecture, seed=1).save_pretrained(tmp_path / "base")
    model = LatentDiffusion.from_pretrained(tmp_path / "base", deferred=["unet"])
    module = SDLightningModule(model, learned_token=LearnedToken(), lora=Lora(), optimizer=small_training.adamw)
    saving = small_training.Saving(tmp_path / "run")
    photos = str(write_photos(tmp_path / "photos"))
    prompt = "a handwritten S* digit"
    data = dreambooth_data(instance_data_dir=photos, instance_prompt=prompt, batch_size=2, resolution=32)
    small_training.fit(module, data, 2, saving)
    folder = saving.last_saved / "pipeline"  # type: ignore[operator]
    file = load_file(folder / WEIGHTS_NAME)
    names = {"text_encoder": "S*"} if architecture == "tiny" else {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}
    assert file.keys() == set(names.values())
    whole, base = (DiffusionPipeline.from_pretrained(path) for path in (folder, tmp_path / "base"))
    for name, key in names.items():
        words = getattr(whole, name).get_input_embeddings().weight
        first = getattr(base, name).get_input_embeddings().weight
        assert torch.equal(file[key][0], words[-1]) and torch.equal(words[:-1], first)
        assert not torch.equal(words[-1], first.mean(0)), "it has been learned"
    whole.load_lora_weights(folder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: str(folder / name))
    card = hub._usage(folder, str(folder), str(tmp_path / "base"), LORA_NAME, "S*", module.latent_diffusion.family)
    told: dict[str, Any] = {}
    exec(card.removeprefix("```python").removesuffix("```"), told)  # what the model card says
    base = told["pipeline"]
    assert np.abs(draw(whole) - draw(base)).max() < 1e-5
    assert np.abs(draw(whole) - draw(whole, "a handwritten digit")).max() > 1e-3, "the word matters"


def draw(pipeline: Any, prompt: str = "a handwritten S* digit") -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    size = {"height": 32, "width": 32}
    return pipeline(prompt, num_inference_steps=2, generator=noise, output_type="np", **size).images


def test_words_that_cannot_be_learned_are_refused() -> None:
    with pytest.raises(UsageError, match=r"=sks: the tokenizer has this word; .* write placeholder_token=S\*, or"):
        LearnedToken("sks").apply_(LatentDiffusion.build("tiny"))
    for blank, word in (("cat toy", "cat-toy"), ("S* ", r"S\*"), ("", r"S\*")):
        with pytest.raises(UsageError, match=f"expected one word without blanks.* write placeholder_token={word}$"):
            LearnedToken(blank)
    taught = LatentDiffusion.build("tiny")
    LearnedToken("S*").apply_(taught)
    with pytest.raises(UsageError, match=r"=S\*: the tokenizer has this word; .* write placeholder_token=S1\*, or"):
        LearnedToken("S*").apply_(taught)
    with pytest.raises(UsageError, match="initializer_token=extraordinary: .* tokens; expected a single"):
        LearnedToken(initializer_token="extraordinary").apply_(LatentDiffusion.build("tiny"))
    cut = LatentDiffusion.build("tiny")
    cut.text_encoders["text_encoder"].resize_token_embeddings(500)  # type: ignore[operator]
    with pytest.raises(UsageError, match="learn_token=true: text_encoder knows 500 tokens, but its tokenizer 574"):
        LearnedToken().apply_(cut)
    assert "S*" not in cut.tokenizers["tokenizer"].get_vocab()
