"""A result on the Hugging Face Hub: checks before a run trains, the model card, and the upload.

Of the settings, the card has a few that tell no place on this machine; ``config.yaml`` is not uploaded.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning._errors import UsageError
from sd_lightning.models.families import FAMILIES, Family
from sd_lightning.models.learned_token import WEIGHTS_NAME as WORD_NAME
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.lora_formats import FILE_NAME as LORA_FILE_NAME
from sd_lightning.models.lycoris import by_layer
from sd_lightning.models.pipeline_folder import first_line, read_json
from sd_lightning.report.evaluation import HEAD, read_evaluation, table
from sd_lightning.report.grid import TILES
from sd_lightning.storage import atomic, far_runs, runs, untrusted
from sd_lightning.storage.streamed_tensor import file_tensors

if TYPE_CHECKING:
    from sd_lightning.apps.run_spec import RunSpec

log = logging.getLogger(__name__)

_RUN = "sd_lightning_run"
"""Key of a card's header: the id in the mark of the run's folder."""
_PICTURES = 8
_PLACES = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")
"""Keys of configurations whose values may be paths of this machine."""
_SETTINGS = {
    "model.architecture": "model",
    "optimizer.lr": "learning rate",
    "data.resolution": "resolution",
    "lora.rank": "LoRA rank",
    "lora.alpha": "LoRA alpha",
    "lora.use_dora": "DoRA",
    "module.train_text_encoder": "text encoder trained",
    "seed": "seed",
}
_OF_LAST = ("final_loss", "val_loss", "caption_gap", "prompted_accuracy")
"""Figures of the last step, which say nothing of a result that is of another."""
_FIGURES = (
    *("steps", "batch_size", "strategy", "precision", "hardware", "devices", "train_seconds", "images_per_second"),
    *("peak_memory_gib", *_OF_LAST, "monitor", "best_value", "best_step", "date", "torch"),
)
"""Of ``summary.json``."""


def check(repo_id: str, run_dir: Path | None, *, private: bool) -> None:
    """Check that a repository is there for a run, or can be made, and that the token may write to it.

    Args:
        repo_id: ``<user or organisation>/<name>``.
        run_dir: The run, if it has a folder already: it may have uploaded there before.
        private: Whether a new repository is private.

    Raises:
        UsageError: There is no network, no token or no right, or the repository is of something else.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    api, owner, found = HfApi(), repo_id.rpartition("/")[0], None
    try:
        validate_repo_id(repo_id)
        if not owner:
            raise HFValidationError("it has no /")
        problem = _missing_right(api.whoami(), owner, repo_id)
        found = None if problem else api.model_info(repo_id)
    except RepositoryNotFoundError:
        problem = ""
    except HFValidationError as error:
        problem = f"{first_line(error)}; expected a user or organisation and a name; write push_to_hub=<user>/my-dog"
    except LocalTokenNotFoundError:
        problem = "there is no token of the hub; run hf auth login, or set HF_TOKEN"
    except Exception as error:  # the hub client raises many types
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            remedy = "refuses the token; run hf auth login, or set HF_TOKEN to one that may write"
        else:
            remedy = "cannot be reached; mend the network, or leave push_to_hub out and upload with sd_lightning.export"
        problem = f"the hub ({first_line(error)}) {remedy}"
    if found is not None and not {each.rfilename for each in found.siblings or ()} <= {".gitattributes"}:
        ours = None if run_dir is None else runs.run_id(run_dir)
        if ours is None or found.card_data is None or found.card_data.get(_RUN) != ours:
            problem = (
                f"that repository exists, and is not of this run; write push_to_hub={repo_id}-2, or delete it at "
                f"https://huggingface.co/{repo_id}/settings"
            )
    if problem:
        raise UsageError(f"push_to_hub={repo_id}: {problem}")
    if not (private if found is None else found.private):
        log.warning("push_to_hub=%s is public, with the newest samples and their prompts or captions", repo_id)


def _missing_right(me: Mapping[str, Any], owner: str, repo_id: str) -> str:
    """Return what a user, or the token, may not do; "" if it may write to the repository."""
    token = me.get("auth", {}).get("accessToken", {})
    roles = {me["name"]: "admin"} | {each["name"]: each.get("roleInOrg", "write") for each in me.get("orgs", [])}
    scopes = token.get("fineGrained", {}).get("scoped", [])
    writable = {each["entity"].get("name") for each in scopes if "repo.write" in each["permissions"]}
    if roles.get(owner, "read") == "read":
        return f"{me['name']} may not write there; write push_to_hub={me['name']}/{repo_id.rpartition('/')[2]}"
    if token.get("role") == "read" or (token.get("role") == "fineGrained" and not writable & {owner, repo_id}):
        return "the token may only read there; make one at https://huggingface.co/settings/tokens that may write"
    return ""


def push_run(spec: RunSpec) -> int:
    """Upload the result of a run; return 1 if it cannot be uploaded: the run itself is complete."""
    folder, repo_id, private = spec.output_dir / "pipeline", spec["push_to_hub"], spec["hub_private"]
    again = f"python -m sd_lightning.export run={far_runs.name_of(spec.output_dir)} push_to_hub={repo_id}"
    again = f"upload it: {again}{'' if private else ' hub_private=false'}"
    return push(folder, repo_id, spec.output_dir, private=private, again=again)


def push(folder: Path, repo_id: str, run_dir: Path | None, *, private: bool, again: str) -> int:
    """Upload a pipeline's folder, or of one with adapters these alone, with a model card.

    Args:
        folder: The pipeline, or another export.
        repo_id: As for :func:`check`.
        run_dir: The run that it is of, if there is one.
        private: Whether a new repository is private.
        again: What a message says to do if it cannot be uploaded.

    Returns:
        Exit code: 0, or 1 if it cannot be uploaded; what is in the folder is complete.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    alone = [folder / name for name in (LORA_NAME, WORD_NAME) if (folder / LORA_NAME).is_file()]
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-pipeline-", dir=folder.parent) as made:
            staged = Path(made, "hub")
            if not alone:
                atomic.hard_link_tree(folder, staged)
            staged.mkdir(exist_ok=True)
            for file in filter(Path.is_file, alone):
                atomic.hard_link(file, staged / file.name)
            for file in staged.rglob("*.json"):
                content = file.read_bytes()
                kept = untrusted.parse_json(content, pairs=_without_places)
                if kept != untrusted.parse_json(content):
                    atomic.write_whole(file, json.dumps(kept, indent=2))
            atomic.write_whole(staged / "README.md", card(staged, repo_id, run_dir))
            api.create_repo(repo_id, private=private, exist_ok=True)
            who = "private" if api.model_info(repo_id).private else "public"  # one that was there keeps what it is
            message = f"Upload of sd_lightning {version('sd-lightning')}"
            api.upload_folder(repo_id=repo_id, folder_path=staged, commit_message=message, delete_patterns="*")
    except Exception as error:  # after hours of training: of whatever type
        log.warning("not uploaded to %s (%s); %s", repo_id, first_line(error), again)
        return 1
    print(f"{'hub':<18} {api.endpoint}/{repo_id} ({who})")
    return 0


def _without_places(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if key not in _PLACES or not isinstance(value, str)}


def card(folder: Path, repo_id: str, run_dir: Path | None) -> str:
    """Return the model card of a folder, and write its pictures there."""
    from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING as PIPELINES
    from huggingface_hub import ModelCardData

    settings: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    if run_dir is not None:
        settings = untrusted.read_yaml(run_dir / "config.yaml")
        summary = read_json(run_dir / "summary.json") if (run_dir / "summary.json").is_file() else {}
    best = summary.get("best_step")
    if best not in (None, summary.get("steps")):
        summary = {key: value for key, value in summary.items() if key not in _OF_LAST}
    name = str(_at(settings, "model.architecture"))
    family = next((each for each in FAMILIES.values() if name in each.architectures), None)
    source, subjects = _source(settings), settings.get("subjects") or [{"prompt": settings.get("instance_prompt")}]
    prompts = [each["prompt"] for each in subjects if each.get("prompt")]
    pictures = [] if run_dir is None else _pictures(run_dir, folder, best)
    weights = next((name for name in (LORA_NAME, LORA_FILE_NAME) if (folder / name).is_file()), None)
    tags = ["text-to-image", "diffusers", "diffusers-training", *(["dreambooth"] if prompts else [])]
    tags += [key for key, kind in PIPELINES.items() if family is not None and kind.__name__ == family.pipeline_class]
    optional: dict[str, Any] = {"instance_prompt": ", ".join(prompts), "widget": pictures}
    optional[_RUN] = run_dir and runs.run_id(run_dir)
    header = ModelCardData(
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=[*tags, "lora", "template:sd-lora"] if weights else tags,
        **source,
        **{key: value for key, value in optional.items() if value},
    )
    base, told = source.get("base_model"), {name: _at(settings, path) for path, name in _SETTINGS.items()}
    optimizer = str(_at(settings, "optimizer._target_")).rpartition(".")[2]
    told |= {"optimizer": optimizer, **{key.replace("_", " "): summary.get(key) for key in _FIGURES}}
    told |= {name: version(name) for name in ("sd-lightning", "diffusers", "transformers")}
    told = {key: f"{each:.4g}" if isinstance(each, float) else each for key, each in told.items()}
    rows = [f"| {key} | {value} |" for key, value in told.items() if str(value) not in ("None", "False", "")]
    found = {} if run_dir is None else read_evaluation(run_dir).get("metrics", {})
    measured = table({"metrics": {key: {**each, "features": None} for key, each in found.items()}})  # it may be a path
    what = f"{'LoRA adapters' if weights else 'A model'}{f' for {base}' if base else ''}, trained with sd_lightning."
    trigger = ["## Trigger words", *(f"Write `{prompt}` to get the subject." for prompt in prompts)]
    licence = source.get("license_link") or source.get("license")
    return "\n\n".join(
        [
            f"---\n{header.to_yaml()}\n---",
            f"# {repo_id.partition('/')[2]}",
            *(["<Gallery />"] if pictures else []),
            what,
            *(trigger if prompts else []),
            "## How to use it",
            _usage(folder, repo_id, base, weights, _at(settings, "learned_token.placeholder_token"), family),
            "## What it was trained with, and what was measured",
            "\n".join(["| | |", "|---|---|", *rows]),
            "\n".join(f"| {' | '.join(line)} |" for line in (HEAD, ["---"] * len(HEAD), *measured) if measured),
            *(["## Licence", f"That of the model it was made from: {licence}."] if licence else []),
        ]
    )


def _usage(folder: Path, repo_id: str, base: Any, weights: str | None, word: str | None, family: Family | None) -> str:
    one_file = folder / "config" / "model_index.json"
    if one_file.is_file():
        name = read_json(one_file)["_class_name"]
        lines = [f"from diffusers import {name}", "from huggingface_hub import snapshot_download", ""]
        files = 'f"{folder}/model.safetensors", config=f"{folder}/config"'
        lines += [f'folder = snapshot_download("{repo_id}")', f"pipeline = {name}.from_single_file({files})"]
        return "\n".join(["```python", *lines, "```"])
    if weights == LORA_NAME and by_layer(file_tensors(folder / weights)):
        return f"`{weights}` has LoHa or LoKr, for `python -m sd_lightning.generate lora={weights}` and the base model."
    if weights == LORA_FILE_NAME:  # diffusers does not know the names of all families
        return f"Put `{weights}` where your program looks for LoRA (`models/loras` of ComfyUI), at strength 1."
    model = repo_id if weights is None else base or "<the model that it was trained on>"
    lines = [
        "```python",
        "from diffusers import DiffusionPipeline",
        "",
        f'pipeline = DiffusionPipeline.from_pretrained("{model}")',
    ]
    if weights is not None:
        lines.append(f'pipeline.load_lora_weights("{repo_id}", weight_name="{weights}")')
        if (folder / WORD_NAME).is_file() and word is not None and family is not None:
            lines[1:1] = ["from huggingface_hub import hf_hub_download", "from safetensors.torch import load_file"]
            lines.append(f'words = load_file(hf_hub_download("{repo_id}", "{WORD_NAME}"))')
            for key, name in zip(family.embedding_keys(word), family.text_encoders, strict=True):
                parts = f"text_encoder=pipeline.{name}, tokenizer=pipeline.{family.tokenizer_of(name)}"
                lines.append(f"pipeline.load_textual_inversion(words[{key!r}], token={word!r}, {parts})")
    return "\n".join([*lines, "```"])


def _source(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return base model and licence: from the card of the model that a run started from, else of its architecture."""
    from huggingface_hub import HfApi, ModelCard

    known = {name: each for family in FAMILIES.values() for name, each in family.architectures.items()}
    base, own = _at(settings, "model.pretrained"), known.get(str(_at(settings, "model.architecture")))
    found: dict[str, Any] = dict(own.hub_licence) if own is not None and base else {}
    if not base or "://" in base:
        return found
    is_local = os.path.exists(base) or base.startswith((".", "/", "~")) or base.count("/") != 1
    data = name = None
    try:
        if not is_local:
            data, name = HfApi().model_info(base).card_data, base
        elif Path(base, "README.md").is_file():
            data = ModelCard.load(Path(base, "README.md")).data
            name = data.get("base_model")
    except Exception as error:  # it may be a folder that is gone
        log.warning("%s: its model card cannot be read (%s); its licence is as known here", base, first_line(error))
    keys = ("license", "license_name", "license_link")
    if data is not None and data.get("license"):
        found = {key: data.get(key) for key in keys if data.get(key)}
    if name and found.get("license_link", "://").find("://") < 0:
        found["license_link"] = f"https://huggingface.co/{name}/blob/main/{found['license_link']}"
    return found | ({"base_model": name} if name else {})


def _pictures(run_dir: Path, folder: Path, step: int | None) -> list[dict[str, Any]]:
    """Cut a step's sheet of samples, or the newest, into its pictures; return them with prompts as a card has them."""
    from PIL import Image

    name = "step-*.png" if step is None else f"step-{step:08d}.png"
    sheets, widget = sorted((run_dir / "samples").glob(name)), []
    if sheets:
        with Image.open(sheets[-1]) as sheet:
            tiles = json.loads(getattr(sheet, "text", {}).get(TILES, "[]"))
            for i, (prompt, box) in enumerate(tiles[:_PICTURES]):
                sheet.crop(box).save(folder / f"image_{i}.png")
                widget.append({"text": prompt or " ", "output": {"url": f"image_{i}.png"}})
    return widget


def _at(settings: Mapping[str, Any], path: str) -> Any:
    node: Any = settings
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
