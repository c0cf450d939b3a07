"""`init_lora=`: a run goes on from a LoRA file of another program, resumes bitwise, and refuses what does not fit."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glyph import write_photos
from refusals import call, refuse
from sd_lightning import LatentDiffusion
from sd_lightning.models.lora import WEIGHTS_NAME
from sd_lightning.storage import checkpoint

RUN = (
    "dreambooth experiment=dreambooth_tiny instance_data_dir=photos 'instance_prompt=a handwritten sks digit' "
    "with_prior_preservation=false sampling.num_inference_steps=1 logger=csv data.batch_size=4 "
)
START = f"{RUN} trainable=lora init_from=base "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with photos, models, a run of adapters with rank 3 and alpha 6, and its export for kohya."""
    root, before = tmp_path_factory.mktemp("init-lora"), Path.cwd()
    os.chdir(root)
    write_photos(root / "photos")
    LatentDiffusion.build("tiny", seed=7).save_pretrained("base")
    LatentDiffusion.build("tiny_klein", seed=7).save_pretrained("klein")
    targets = "'lora.target_modules=[to_q,to_v]'"
    assert call(f"{START} lora.rank=3 lora.alpha=6 {targets} max_train_steps=2 output_dir=first") == 0
    assert call("export run=first format=kohya output_dir=kohya") == 0
    yield root
    os.chdir(before)


def weights(run: str) -> Path:
    return Path(run, "pipeline", WEIGHTS_NAME)


@pytest.mark.parametrize("source", ["kohya/lora.safetensors", "kohya", "first"])
def test_a_run_goes_on_from_a_file_a_folder_and_a_run(source: str, folder: Path) -> None:
    run = f"on-{source.replace('/', '-')}"
    command = f"{START} init_lora={source} optimizer.lr=0 learning_rate=0 max_train_steps=1 output_dir={run}"
    assert call(command) == 0
    assert load_file(weights(run)).keys() == load_file(weights("first")).keys()
    assert weights(run).read_bytes() == weights("first").read_bytes(), "at a learning rate of zero"
    settings = Path(run, "config.yaml").read_text()
    assert "rank: 3" in settings and "alpha: 6.0" in settings
    assert call(f"export run={run} format=kohya output_dir={run}-kohya") == 0
    theirs, ours = load_file("kohya/lora.safetensors"), load_file(f"{run}-kohya/lora.safetensors")
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)


def test_a_run_that_went_on_resumes_bitwise_without_the_file(folder: Path) -> None:
    shutil.copy("kohya/lora.safetensors", "lent.safetensors")
    command = f"{START} init_lora=lent.safetensors"
    assert call(f"{command} max_train_steps=4 output_dir=whole") == 0
    assert call(f"{command} max_train_steps=2 output_dir=halves") == 0
    Path("lent.safetensors").unlink()
    assert call(f"{command} max_train_steps=4 output_dir=halves resume=auto") == 0
    assert weights("whole").read_bytes() == weights("halves").read_bytes()
    assert checkpoint.step_of(checkpoint.all_checkpoints("halves")[-1]) == 4


def test_a_run_with_ranks_by_layer_is_gone_on_from_and_resumed(folder: Path) -> None:
    ranks = "'lora.rank_pattern={attn1:2,down_blocks.*.attentions:5,mid_block:0}' 'lora.alpha_pattern={attn1:1.5}'"
    assert call(f"{START} {ranks} max_train_steps=1 output_dir=ranks") == 0
    assert call(f"{START} {ranks} max_train_steps=2 output_dir=ranks resume=auto") == 0
    assert call("export run=ranks format=comfyui output_dir=ranks-comfyui") == 0
    for source in ("ranks", "ranks-comfyui"):
        assert call(f"{START} init_lora={source} learning_rate=0 max_train_steps=1 output_dir=on-{source}") == 0
        first, second = load_file(weights("ranks")), load_file(weights(f"on-{source}"))
        assert {len(each) for key, each in first.items() if "lora_A" in key} == {2, 4, 5}
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert call(f"{START} max_train_steps=2 output_dir=on-ranks resume=auto") == 0


def test_a_run_that_went_on_is_resumed_again_and_again_without_naming_the_file(folder: Path) -> None:
    assert call(f"{START} init_lora=first max_train_steps=1 output_dir=legs") == 0
    for steps in (2, 3):
        assert call(f"{START} max_train_steps={steps} output_dir=legs resume=auto") == 0
        assert "init_lora: first" in Path("legs/config.yaml").read_text()
    assert call(f"{START} init_lora=first max_train_steps=4 output_dir=legs resume=auto") == 0


def test_what_does_not_fit_is_refused_before_training(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_file({"lora_unet_x.lora_down.weight": load_file(weights("first")).popitem()[1]}, "strange.safetensors")
    Path("torn.safetensors").write_bytes(b"not a file")
    torch.save(load_file(weights("first")), "pickled.pt")
    klein = "model=tiny_klein init_from=klein train_text_encoder=false resolution=32"
    for arguments, words in (
        (f"{START} init_lora=none", ("init_lora=none: no such file or run",)),
        (f"{RUN} init_from=base init_lora=first", ("got init_lora=first", "trains no adapters; add trainable=lora")),
        (
            f"{START} init_lora=first lora.rank=4",
            ("got lora.rank=4 and init_lora=first", "have rank=3; leave lora.rank"),
        ),
        (
            f"{START} init_lora=kohya lora.alpha=3",
            ("got lora.alpha=3", "init_lora=kohya/lora", "have alpha=6.0; leave"),
        ),
        (f"{START} init_lora=strange.safetensors", ("init_lora=strange.safetensors: it has no adapters of a model",)),
        (f"{START} init_lora=torn.safetensors", ("torn.safetensors: not a complete safetensors file",)),
        (f"{START} init_lora=pickled.pt", ("init_lora=pickled.pt: expected", "safetensors; others may hold code")),
        (f"{RUN} trainable=lora init_from=first init_lora=first", ("has these adapters in it already",)),
        (f"{RUN} trainable=lora {klein} init_lora=kohya", ("these are adapters of model=tiny", "Flux2KleinPipeline")),
        (f"{START} init_lora=first train_text_encoder=false", ("adapters of text_encoder", "train_text_encoder=true")),
        (f"{START} network_weights=first", ("write init_lora=first",)),
        (f"{START} network_train_unet_only=true", ("write train_text_encoder=false",)),
        (
            f"{START} network_train_text_encoder_only=true",
            ("write lora.target_modules=[] module.train_text_encoder=t",),
        ),
        (
            f"{START} 'lora.target_modules=[]' train_text_encoder=false",
            ("adapters of text encoders alone, and none is",),
        ),
        (f"{START} 'lora.rank_pattern={{attn9:2}}'", ("lora.rank_pattern: no layer with adapters has 'attn9'",)),
    ):
        refuse(f"{arguments} max_train_steps=2 output_dir=new", words, folder, capfd)
    assert call(f"{START} init_lora=kohya resume=first max_train_steps=4 output_dir=new") == 2
    assert "and that run began with init_lora=null; resume has its adapters" in capfd.readouterr().err
