"""A new word: one row of an embedding that is trained, and nothing else of it."""

import pytest
import torch

import small_training
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.learned_token import LearnedEmbedding, LearnedToken
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
    assert torch.equal(model.tokenize(captions), before)
    ids = model.tokenize(["a handwritten S*", "a handwritten two"])
    assert ids[0, 0, 3] == embedding(model).num_embeddings - 1
    ours, theirs = (m.condition(list(m.text_encoders.values()), {"input_ids": before}) for m in (model, plain))
    assert torch.equal(ours["encoder_hidden_states"], theirs["encoder_hidden_states"])
    new, two = model.condition(list(model.text_encoders.values()), {"input_ids": ids})["encoder_hidden_states"]
    assert torch.allclose(new, two, atol=1e-6)


@pytest.mark.parametrize("train_text_encoder", [False, True])
def test_only_the_new_row_has_a_gradient(train_text_encoder: bool) -> None:
    module = small_training.module(train_text_encoder=train_text_encoder, learned_token=LearnedToken())
    encoder = module.text_encoder
    trained = [name for name, p in encoder.named_parameters() if p.requires_grad]  # type: ignore[union-attr]
    assert len(trained) == 1 or train_text_encoder
    ids = module.latent_diffusion.tokenize(["a S* digit", "a two"])
    encoder(ids[:, 0])[0].square().sum().backward()  # type: ignore[operator]
    gradient = embedding(module.latent_diffusion).weight.grad
    assert gradient is not None and gradient[-1].abs().max() > 0 and not gradient[:-1].any()
    decay = [group.get("weight_decay") for group in module.configure_optimizers().param_groups]  # type: ignore[union-attr]
    assert decay[-1] == 0.0 and decay[0] > 0


def test_words_that_cannot_be_learned_are_refused() -> None:
    with pytest.raises(UsageError, match="placeholder_token=sks: the tokenizer has this word; expected a new one"):
        LearnedToken("sks").apply_(LatentDiffusion.build("tiny"))
    with pytest.raises(UsageError, match="initializer_token=extraordinary: .* tokens; expected a single"):
        LearnedToken(initializer_token="extraordinary").apply_(LatentDiffusion.build("tiny"))
    with pytest.raises(UsageError, match="learn_token=true: a StableDiffusionXLPipeline pools"):
        SDLightningModule(LatentDiffusion.build(SMALL_SDXL), learned_token=LearnedToken())
