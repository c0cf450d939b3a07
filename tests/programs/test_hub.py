"""Results on the Hugging Face Hub, a stand-in for its API: refused before training, or uploaded without secrets."""

import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from PIL import Image
from safetensors import safe_open

from glyph import write_photos
from hub_server import TOKEN, Hub, hub_server
from refusals import call, refuse
from sd_lightning import LatentDiffusion
from sd_lightning.apps import hub as apps_hub
from sd_lightning.models.lora import WEIGHTS_NAME
from sd_lightning.storage import runs

RUN = (
    "dreambooth experiment=dreambooth_tiny instance_data_dir=photos 'instance_prompt=a handwritten sks digit' "
    "with_prior_preservation=false sampling.num_inference_steps=1 logger=csv data.batch_size=4 init_from=base "
    "trainable=lora lora.rank=2 'validation_prompt=a sks digit in the snow' "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root, before = tmp_path_factory.mktemp("hub"), Path.cwd()
    os.chdir(root)
    write_photos(root / "photos")
    LatentDiffusion.build("tiny", seed=7).save_pretrained("base")
    yield root
    os.chdir(before)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def uploaded(folder: Path, hub: Hub) -> dict[str, bytes]:
    """The files of a run of two steps, which another test may have trained."""
    if not Path("run/summary.json").exists():
        assert call(f"{RUN} max_train_steps=2 output_dir=run push_to_hub=me/dog") == 0
    else:
        assert call(f"export run=run push_to_hub=me/dog output_dir=out-{len(list(folder.glob('out-*')))}") == 0
    return hub.repos["me/dog"]


def test_a_run_uploads_its_adapters_with_a_card(folder: Path, hub: Hub, uploaded: dict[str, bytes]) -> None:
    assert hub.private["me/dog"]
    assert uploaded[WEIGHTS_NAME] == Path("run/pipeline", WEIGHTS_NAME).read_bytes()
    pictures = [f"image_{i}.png" for i in range(4)]
    assert sorted(uploaded) == sorted(["README.md", WEIGHTS_NAME, *pictures])
    header = hub.header("me/dog")
    assert header["instance_prompt"] == "a handwritten sks digit"
    assert header["widget"] == [{"text": "a sks digit in the snow", "output": {"url": name}} for name in pictures]
    tags = {"text-to-image", "diffusers", "diffusers-training", "lora", "template:sd-lora", "dreambooth"}
    assert tags | {"stable-diffusion"} == {*header["tags"]}
    assert header["library_name"] == "diffusers" and header[apps_hub._RUN] == runs.run_id(Path("run"))
    card = uploaded["README.md"].decode()
    loads = f'load_lora_weights("me/dog", weight_name="{WEIGHTS_NAME}")'
    rows = ("| LoRA rank | 2 |", "| steps | 2 |", "| optimizer | AdamW |", "| diffusers | ")
    assert "| seed | 0 |" in card
    for words in ("<Gallery />", "`a handwritten sks digit`", loads, *rows):
        assert words in card
    with Image.open(io.BytesIO(uploaded["image_0.png"])) as picture:
        assert picture.width == picture.height


def test_nothing_of_this_machine_is_uploaded(folder: Path, uploaded: dict[str, bytes]) -> None:
    assert_no_secrets(uploaded, folder)


def assert_no_secrets(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        for secret in (str(folder), str(Path.home()), TOKEN, "photos", "init_from"):
            assert secret.encode() not in content, f"{secret} in {name}"


def test_a_pipeline_is_uploaded_whole_and_public_if_asked(folder: Path, hub: Hub, uploaded: dict[str, bytes]) -> None:
    command = "export run=run merge_lora=true output_dir=whole push_to_hub=me/whole hub_private=false"
    config = Path("base/unet/config.json")
    assert call(command) == 0
    assert not hub.private["me/whole"]
    assert {"model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"} <= hub.repos[
        "me/whole"
    ].keys()
    assert 'DiffusionPipeline.from_pretrained("me/whole")' in hub.repos["me/whole"]["README.md"].decode()
    assert "lora" not in hub.header("me/whole")["tags"]
    assert config.is_file()
    assert_no_secrets(hub.repos["me/whole"], folder)


def test_a_repository_that_was_public_is_not_called_private(
    folder: Path, hub: Hub, uploaded: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    hub.repos["me/open"], hub.private["me/open"] = {".gitattributes": b""}, False
    assert call("export run=run output_dir=open push_to_hub=me/open") == 0
    out, err = capfd.readouterr()
    assert re.search(r"hub +http://.*/me/open \(public\)", out)
    assert "me/open is public, with the newest samples and their prompts or captions" in err
    assert call("export run=run output_dir=shut push_to_hub=me/shut") == 0
    assert "captions" not in capfd.readouterr().err


def test_a_file_for_front_ends_is_not_told_to_diffusers(folder: Path, hub: Hub, uploaded: dict[str, bytes]) -> None:
    """diffusers has not the names of all families."""
    assert call("export run=run format=comfyui output_dir=comfyui push_to_hub=me/comfy") == 0
    card = hub.repos["me/comfy"]["README.md"].decode()
    assert "Put `lora.safetensors` where your program looks for LoRA (`models/loras` of ComfyUI)" in card
    assert "load_lora_weights" not in card and "lora" in hub.header("me/comfy")["tags"]
    shutil.copytree("run/pipeline", "bob/pipeline")
    assert call("export run=bob/pipeline format=comfyui output_dir=bobs") == 0
    for file, title in (("comfyui", "run"), ("bobs", "pipeline")):
        with safe_open(f"{file}/lora.safetensors", "pt") as opened:
            assert opened.metadata()["modelspec.title"] == title, "not the name of a folder around it"


def test_the_card_has_the_words_of_all_subjects(folder: Path, hub: Hub, uploaded: dict[str, bytes]) -> None:
    shutil.copytree("run", "two")
    settings = yaml.safe_load(Path("run/config.yaml").read_text())
    settings["instance_prompt"] = None
    settings["subjects"] = [{"dir": "photos", "prompt": f"a {word} digit"} for word in ("sks", "zwx")]
    Path("two/config.yaml").write_text(yaml.safe_dump(settings))
    assert call("export run=two output_dir=of-two push_to_hub=me/two") == 0
    card, header = hub.repos["me/two"]["README.md"].decode(), hub.header("me/two")
    assert "Write `a sks digit` to get the subject." in card and "Write `a zwx digit` to get the subject." in card
    assert header["instance_prompt"] == "a sks digit, a zwx digit" and "dreambooth" in header["tags"]
    assert_no_secrets(hub.repos["me/two"], folder)


def test_the_card_has_licence_and_base_of_the_source(folder: Path, hub: Hub) -> None:
    header = "license: other\nlicense_name: some-licence\nlicense_link: LICENSE.md\nbase_model: them/that"
    hub.repos["them/base"] = {"README.md": f"---\n{header}\n---\n".encode()}
    Path("with-card").mkdir()
    Path("with-card/README.md").write_text(f"---\n{header}\n---\n")
    for base, name, link in (
        ("them/base", "them/base", "https://huggingface.co/them/base/blob/main/LICENSE.md"),
        ("with-card", "them/that", "https://huggingface.co/them/that/blob/main/LICENSE.md"),
    ):
        found = apps_hub._source({"model": {"pretrained": base, "architecture": "flux1_dev"}})
        assert found == {"license": "other", "license_name": "some-licence", "license_link": link, "base_model": name}
    hub.fails = "them/gated"  # or a folder that is not here, of that name
    gated = apps_hub._source({"model": {"pretrained": "them/gated", "architecture": "flux1_dev"}})
    assert gated["license_name"] == "flux-1-dev-non-commercial-license" and "base_model" not in gated
    assert gated["license_link"].endswith("black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md")
    for folder_of_this_machine in ("base", "runs/gone"):
        settings = {"model": {"pretrained": folder_of_this_machine, "architecture": "sd15"}}
        assert apps_hub._source(settings) == {"license": "creativeml-openrail-m"}


def test_what_cannot_be_uploaded_is_said_before_training(
    folder: Path,
    hub: Hub,
    uploaded: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each in one line, with nothing written and nothing asked of the hub that changes it."""
    hub.repos["me/other"] = {"README.md": b"---\ntags: [cat]\n---\n"}
    hub.orgs = [{"name": "team", "roleInOrg": "read"}, {"name": "club", "roleInOrg": "write"}]
    before = {name: dict(files) for name, files in hub.repos.items()}

    def refused(name: str, *words: str) -> None:
        refuse(f"{RUN} max_train_steps=2 output_dir=new push_to_hub={name}", words, folder, capfd)
        refuse(f"export run=run output_dir=new push_to_hub={name}", words, folder, capfd)
        assert not Path("new").exists()

    refused("dog", "push_to_hub=dog", "write push_to_hub=<user>/my-dog")
    refused("true", "push_to_hub=true", "expected")  # the flag of diffusers' scripts
    refused("me/a--b", "push_to_hub=me/a--b", "write push_to_hub=<user>/my-dog")
    refused("me/other", "that repository exists, and is not of this run", "write push_to_hub=me/other-2")
    refused("team/dog", "me may not write there", "write push_to_hub=me/dog")
    refused("them/dog", "me may not write there", "write push_to_hub=me/dog")
    hub.role = "read"
    refused("me/new", "the token may only read there", "https://huggingface.co/settings/tokens")
    hub.role, hub.scoped = "fineGrained", [{"entity": {"name": "club"}, "permissions": ["repo.write"]}]
    refused("me/new", "the token may only read there")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    refused("me/new", "the hub (", "refuses the token; run hf auth login")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(folder / "none"))
    refused("me/new", "there is no token of the hub; run hf auth login, or set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.role, hub.fails = "write", "whoami"
    refused("me/new", "the hub (", "cannot be reached; mend the network")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused("me/new", "the hub (", "cannot be reached; mend the network")
    assert hub.repos == before


def test_a_run_that_goes_on_uploads_to_its_own_repository(
    folder: Path, hub: Hub, uploaded: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    first = hub.repos["me/dog"][WEIGHTS_NAME]
    assert call(f"{RUN} max_train_steps=3 output_dir=run push_to_hub=me/dog resume=auto") == 0
    assert hub.repos["me/dog"][WEIGHTS_NAME] != first
    refuse(
        f"{RUN} max_train_steps=2 output_dir=run push_to_hub=me/dog overwrite=true",
        ("is not of this run",),
        folder,
        capfd,
    )


def test_an_upload_that_fails_leaves_a_finished_run(folder: Path, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.fails = "/commit/"
    assert call(f"{RUN} max_train_steps=1 output_dir=failed push_to_hub=me/failed") == 1
    shown = capfd.readouterr().err
    assert re.search(r"not uploaded to me/failed \(.*sd_lightning.export run=failed push_to_hub=me/failed", shown)
    assert json.loads(Path("failed/summary.json").read_text())["steps"] == 1
    assert not list(Path("failed").glob(".tmp-*"))
    assert call("export run=failed output_dir=kept push_to_hub=me/failed") == 1
    shown = capfd.readouterr().err
    assert "not uploaded to me/failed (" in shown and "delete kept, and write the same command again" in shown
    assert Path("kept/model_index.json").is_file()
    hub.fails = ""
    assert call("export run=failed output_dir=later push_to_hub=me/failed") == 0, "what the message says"
    assert WEIGHTS_NAME in hub.repos["me/failed"]


def test_a_finished_run_is_uploaded_when_it_is_asked_again(
    folder: Path, hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a job does that was killed in the upload, and started again."""
    again = f"{RUN} max_train_steps=1 output_dir=asked resume=auto push_to_hub=me/asked hub_private=false"
    hub.fails = "/commit/"
    assert call(again) == 1
    assert re.search(r"export run=asked push_to_hub=me/asked hub_private=false\n", capfd.readouterr().err)
    hub.fails = ""
    assert call(again) == 0
    assert "is complete" in capfd.readouterr().err and WEIGHTS_NAME in hub.repos["me/asked"]


def test_the_evaluation_comes_before_an_upload_and_is_on_the_card(folder: Path, hub: Hub) -> None:
    digits = "trainer.max_steps=2 trainer.val_check_interval=2 data.num_val_samples=20 data.batch_size=16"
    rest = "callbacks.samples=null callbacks=evaluation sampling.num_inference_steps=1 output_dir=judged"
    hub.fails = "/commit/"
    assert call(f"train {digits} {rest} push_to_hub=me/judged") == 1
    record = json.loads(Path("judged/evaluation.json").read_text())
    record["metrics"]["caption gap"]["features"] = str(folder)
    Path("judged/evaluation.json").write_text(json.dumps(record))
    hub.fails = ""
    assert call(f"train {digits} {rest} push_to_hub=me/judged resume=auto") == 0
    card = hub.repos["me/judged"]["README.md"].decode()
    assert (
        "| metric | value | 95 % interval |" in card and "\n| prompted accuracy | " in card and str(folder) not in card
    )


def test_the_card_of_the_best_step_has_no_figures_of_the_last(folder: Path, uploaded: dict[str, bytes]) -> None:
    shutil.copytree("run", "best-run")
    summary = json.loads(Path("run/summary.json").read_text())
    summary |= {"monitor": "val/loss", "best_value": 0.25, "val_loss": 9.75, "final_loss": 8.75, "caption_gap": 7.75}
    for step, is_told in ((1, False), (summary["steps"], True)):
        Path("best-run/summary.json").write_text(json.dumps(summary | {"best_step": step}))
        Path(f"card-{step}").mkdir()
        card = apps_hub.card(Path(f"card-{step}"), "me/best", Path("best-run"))
        assert all(f"| {line} |" in card for line in ("monitor | val/loss", "best value | 0.25", f"best step | {step}"))
        assert all((figure in card) == is_told for figure in ("9.75", "8.75", "7.75", "<Gallery />"))


def test_a_second_upload_leaves_no_earlier_files(folder: Path, hub: Hub, uploaded: dict[str, bytes]) -> None:
    hub.repos["me/dog"][".gitattributes"] = b""
    assert call("export run=run format=kohya output_dir=second push_to_hub=me/dog") == 0
    pictures = [f"image_{i}.png" for i in range(4)]
    assert sorted(hub.repos["me/dog"]) == sorted([".gitattributes", "README.md", "lora.safetensors", *pictures])


def test_paths_are_taken_out_of_all_configurations(folder: Path, hub: Hub, uploaded: dict[str, bytes]) -> None:
    shutil.copytree("run/pipeline", "told")
    nested = {"text_config": {"_name_or_path": str(folder)}, "tokenizer_file": str(folder), "name_or_path": 7}
    Path("told/tokenizer/tokenizer_config.json").write_text(json.dumps({"name_or_path": str(folder)} | nested))
    apps_hub.push(Path("told"), "me/told", None, private=True, again="")
    assert WEIGHTS_NAME in hub.repos["me/told"]
    Path("told", WEIGHTS_NAME).unlink()
    assert apps_hub.push(Path("told"), "me/whole-told", None, private=True, again="") == 0
    files = hub.repos["me/whole-told"]
    assert json.loads(files["tokenizer/tokenizer_config.json"]) == {"text_config": {}, "name_or_path": 7}
    assert files["unet/config.json"] == Path("told/unet/config.json").read_bytes()
    assert_no_secrets(files, folder)


def test_what_the_card_says_runs(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adapters with a learned word, of a whole pipeline, and of one file; tests/models has SDXL's words."""
    run = RUN.replace("sks", "S*")
    assert call(f"{run} learn_token=true train_text_encoder=false max_train_steps=1 output_dir=word") == 0
    for name, kind in {"alone": "diffusers", "merged": "diffusers merge_lora=true", "file": "single_file"}.items():
        assert call(f"export run=word format={kind} output_dir=word-{name} push_to_hub=me/{name}") == 0
        there = folder / f"there-{name}"
        for file, content in hub.repos[f"me/{name}"].items():
            (there / file).parent.mkdir(parents=True, exist_ok=True)
            (there / file).write_bytes(content)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, there=there: str(there))
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name, there=there: str(there / name))
        [code] = re.findall(r"```python\n(.*?)```", (there / "README.md").read_text(), re.DOTALL)
        made: dict[str, Any] = {}
        exec(code.replace("<the model that it was trained on>", "base").replace(f'("me/{name}"', f'("{there}"'), made)
        assert "S*" in made["pipeline"].tokenizer.get_vocab()
        assert name != "alone" or made["pipeline"].get_active_adapters()
