"""The DreamBooth program: check photos and prompts, draw class images, and train."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sd_lightning._conf.annotations import as_override
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps import class_images, train
from sd_lightning.apps.planning import run_of
from sd_lightning.apps.run_spec import RunSpec, target_of
from sd_lightning.apps.settings import options
from sd_lightning.data.captions import CaptionOptions
from sd_lightning.data.sources.dreambooth import (
    Picture,
    Subject,
    balanced,
    check_readable,
    find_subjects,
    held_out,
    ignored_photos,
    num_per_prompt,
    photos_of,
)
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.models.meta import meta_twin
from sd_lightning.models.trigger_words import tell_of_trigger_word
from sd_lightning.planner.forecast import Forecast, Forecaster
from sd_lightning.quantization.casting import cast_
from sd_lightning.storage.atomic import check_writable
from sd_lightning.strategies import engine_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sd_lightning.models.generation import SamplingOptions

log = logging.getLogger(__name__)

_LEARNED_TOKEN = "sd_lightning.models.learned_token.LearnedToken"
_SAME = {
    "max_train_steps": "trainer.max_steps",
    "learning_rate": "optimizer.lr",
    "resolution": "data.resolution",
    "gradient_checkpointing": "speed.gradient_checkpointing",
}
"""DreamBooth's settings -> their names in the main configuration."""
_SWITCHES = {
    "learn_token": ("placeholder_token", "initializer_token"),
    "with_prior_preservation": (
        *("class_prompt", "class_prompts", "class_data_dir", "num_class_images", "sample_batch_size"),
        *("prior_loss_weight", "prior_generation_precision"),
    ),
}
"""Switches -> settings that are unused unless the switch is on."""


def run(cfg: DictConfig) -> int:
    """Check the photos and prompts, draw missing class images, and train.

    Returns:
        Exit code of :func:`sd_lightning.apps.train.run`.
    """
    return train.start(subject_run(RunSpec.of(cfg)), functools.partial(train.run, prepare=prepare))


def subject_run(spec: RunSpec) -> RunSpec:
    """Return a run with what DreamBooth's own settings mean in the words of ``train``, after checks of them.

    Raises:
        UsageError: The photos cannot be used, or settings contradict each other.
    """
    check_command_line(spec)
    folder: str = spec["output_dir"]
    stripped = folder.rstrip("/") or folder  # else a slash would be in the default class_data_dir, too
    pictures = [key for key in ("class_data_dir", "data.class_data_dir") if spec[key] == f"{folder}-class-images"]
    spec = spec.with_settings({"output_dir": stripped} | dict.fromkeys(pictures, f"{stripped}-class-images"))
    photos = captioned_photos(spec)
    check_folders(spec, photos)
    if (folder_of_others := spec.get("data.val_data_dir")) is not None:  # before class images are drawn
        how = {name: spec[f"data.{name}"] for name in ("caption_extension", "masked_loss")}
        held_out(folder_of_others, photos, **how)
    every = [photo for each in photos.values() for photo in each]
    kept = captioned_photos(spec, CaptionOptions.kept).values()
    captions = sorted({photo.caption for each in kept for photo in each})
    check_preservation(spec, captions)
    changes: dict[str, Any] = {"data.class_prompts": class_prompts(spec, captions)}
    if spec["learn_token"]:
        check_token(spec, captions)
        token = {name: spec[name] for name in ("placeholder_token", "initializer_token")}
        changes["learned_token"] = {"_target_": _LEARNED_TOKEN, **token}
    groups = caption_groups(photos, spec["validation_prompt"], for_samples=True)
    if (spec["validation_prompt"] or spec["subjects"] or len(groups) > 1) and spec.get("callbacks.samples") is not None:
        changes["callbacks.samples.prompts"] = [each for group in groups for each in islice(cycle(group), 4)]
        if len(groups) > 1 and "callbacks.samples.columns" not in spec.overridden:
            changes["callbacks.samples.columns"] = 4
    spec = spec.with_settings(changes)
    if spec["use_8bit_adam"]:
        spec = with_8bit_adam(spec)
    if is_first_process():
        check_readable(every, resolution=spec["data.resolution"], max_pixels=spec["data.max_image_pixels"])
        shown = Counter(balanced(photos))
        for subject, own in photos.items():
            if len(photos) > 1:
                counts = (len(set(own)), sum(shown[photo] for photo in set(own)), shown.total())
                log.info("subject %s: %d photos, %d of every %d that are shown", subject.dir, *counts)
            ignored = ignored_photos(subject.dir, masked_loss=spec["data.masked_loss"])
            if ignored is not None:
                log.warning("instance_data_dir=%s: not used: %s", subject.dir, ignored)
    return spec


def captioned_photos(
    spec: RunSpec, written: Callable[[CaptionOptions, str], str] = CaptionOptions.written
) -> dict[Subject, list[Picture]]:
    """Return the photos of each subject, captioned as the model is to read them, or with what of it is always there.

    Raises:
        UsageError: The subjects or their photos cannot be used.
    """
    options = CaptionOptions(**{field.name: spec[f"data.{field.name}"] for field in fields(CaptionOptions)})
    how = {name: spec[f"data.{name}"] for name in ("caption_extension", "masked_loss")}
    subjects = find_subjects(spec["subjects"], spec["instance_data_dir"], spec["instance_prompt"])
    found = photos_of(subjects, **how).items()
    return {each: [replace(photo, caption=written(options, photo.caption)) for photo in own] for each, own in found}


def caption_groups(
    photos: Mapping[Subject, Sequence[Picture]], prompt: str | None = None, *, for_samples: bool = False
) -> list[list[str]]:
    """Return the distinct captions of each subject, and of each of its kohya folders.

    For samples, a subject's own ``validation_prompt``, or else the ``prompt`` of all, is in their place.
    """
    groups: dict[Any, list[str]] = {}
    for subject, own in photos.items():
        given = (subject.validation_prompt or prompt) if for_samples else None
        for photo in own:
            groups.setdefault(given or (subject, Path(photo.path).parent), []).append(given or photo.caption)
    return [[*dict.fromkeys(captions)] for captions in groups.values()]


def check_command_line(spec: RunSpec) -> None:
    """Check that the command line gives no settings whose switch is off, and no setting by two names.

    Raises:
        UsageError: It does.
    """
    for switch, names in _SWITCHES.items():
        unused = [name for name in names if name in spec.overridden and spec[name]]
        if unused and not spec[switch] and switch not in spec.overridden:  # an explicit switch=false is meant
            shown = " ".join(f"{name}={as_override(spec[name])}" for name in unused)
            raise UsageError(
                f"dreambooth got {shown}, which nothing uses without {switch}; add {switch}=true, or leave "
                f"{', '.join(unused)} out"
            )
    for name, other in _SAME.items():
        if {name, other} <= spec.overridden and spec[name] != spec[other]:
            raise UsageError(
                f"dreambooth got {name}={spec[name]} and {other}={spec[other]}, two names of one setting; expected one "
                f"of them; leave {other} out"
            )


def check_folders(spec: RunSpec, subjects: Iterable[Subject]) -> None:
    """Check that the class images have a folder apart from the photos of the subject.

    Raises:
        UsageError: They have no folder, or one folder contains the other.
    """
    if not spec["with_prior_preservation"]:
        return
    if not spec["class_data_dir"]:
        raise UsageError(
            "dreambooth got class_data_dir= without a value; expected a folder for the class images; leave "
            "class_data_dir out"
        )
    pictures = Path(spec["class_data_dir"]).resolve()
    for subject in subjects:
        photos = Path(subject.dir).resolve()
        if photos.is_relative_to(pictures) or pictures.is_relative_to(photos):
            how = "the same folder" if photos == pictures else "one inside the other"
            both = f"class_data_dir={spec['class_data_dir']} and instance_data_dir={subject.dir}"
            raise UsageError(
                f"dreambooth got {both}, {how}; expected two folders apart, or photos of the subject and pictures of "
                "its class are taken for each other; leave class_data_dir out, or choose another "
                "class_data_dir=<folder>"
            )


def class_prompts(spec: RunSpec, captions: Sequence[str]) -> list[str]:
    """Return the class prompts; none without prior preservation.

    Args:
        spec: The run.
        captions: Captions of the photos.

    Raises:
        UsageError: Settings contradict each other, or a caption has no word that tells the subject from its class.
    """
    of_subjects = dict.fromkeys(each.get("class_prompt") or "" for each in spec.get("subjects") or ())
    if not spec["with_prior_preservation"]:
        if any(of_subjects) and "with_prior_preservation" not in spec.overridden:
            raise UsageError(
                "dreambooth got subjects with a class_prompt, which nothing uses without with_prior_preservation; add "
                "with_prior_preservation=true, or leave class_prompt out"
            )
        return []
    prompts = [prompt.strip() for prompt in [spec["class_prompt"] or "", *spec["class_prompts"]] if prompt.strip()]
    prompts += {prompt.strip(): None for prompt in of_subjects if prompt.strip() not in ("", *prompts)}
    if not prompts:
        raise UsageError(
            "dreambooth got with_prior_preservation=true without a class prompt; expected what the subject is one of: "
            "write 'class_prompt=a photo of a dog', or several with 'class_prompts=[a photo of a dog, a dog outdoors]'"
        )
    for name in ("num_class_images", "sample_batch_size"):
        if spec[name] < 1:
            raise UsageError(f"dreambooth got {name}={spec[name]}; expected at least 1; write {name}=100")
    without = [prompt for prompt, count in num_per_prompt(prompts, spec["num_class_images"]).items() if not count]
    if without:
        raise UsageError(
            f"dreambooth got num_class_images={spec['num_class_images']}, of which none is left for {without[0]!r}; "
            f"expected one for each of class_prompts; write num_class_images={len(prompts)}"
        )
    for caption, prompt in ((c, p) for c in captions for p in prompts):
        # Every caption has the learned token.
        has_own = spec["learn_token"] and not _has_word(prompt, spec["placeholder_token"])
        if not has_own and not _words(caption) - _words(prompt):
            raise UsageError(
                f"dreambooth got instance_prompt={caption!r}, which has no word that tells the subject from its class "
                f"{prompt!r}; expected a rare word for the subject, such as sks: write "
                f"'instance_prompt={_with_token(caption, 'sks')}'"
            )
    return prompts


def check_token(spec: RunSpec, captions: Iterable[str]) -> None:
    """Check that a new word is valid, for one subject, and in every caption of every epoch.

    Raises:
        UsageError: It is not.
    """
    token: str = spec["placeholder_token"]
    LearnedToken(token)  # raises if it is not a valid word
    if len(spec["subjects"]) > 1:
        raise UsageError(
            f"dreambooth got learn_token=true and {len(spec['subjects'])} subjects, all of which {token} would name; "
            "expected one; write learn_token=false, and a rare word in each subject's prompt"
        )
    for caption in captions:
        if not _has_word(caption, token):
            raise UsageError(
                f"dreambooth got learn_token=true and instance_prompt={caption!r} without the word {token}; write "
                f"'instance_prompt={_with_token(caption, token)}', or placeholder_token=<the word>"
            )


def check_preservation(spec: RunSpec, captions: Iterable[str]) -> None:
    """Check before class images are drawn that there are none beside ``preservation``, and that it fits the captions.

    Raises:
        UsageError: It does not.
    """
    if spec.preservation is None:
        return
    if spec["with_prior_preservation"]:
        raise UsageError(
            "dreambooth got preservation and with_prior_preservation=true, two ways to keep the class; expected one: "
            "write with_prior_preservation=false, or preservation=none"
        )
    spec.preservation.check(captions, token=spec["placeholder_token"] if spec["learn_token"] else None)


def _words(prompt: str) -> set[str]:
    return set(re.findall(r"\w+", prompt.lower()))


def _has_word(prompt: str, word: str) -> bool:
    """Return whether a prompt contains a word, which may begin or end with non-letters."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt) is not None


def _with_token(prompt: str, token: str) -> str:
    head, _, last = prompt.rpartition(" ")
    return f"{head} {token} {last}".strip()


def with_8bit_adam(spec: RunSpec) -> RunSpec:
    """Return a run with ``optimizer=adamw8bit`` and the settings of its AdamW, except ``fused``.

    Raises:
        UsageError: Another optimizer was chosen.
    """
    chosen = {key: value for key, value in spec["optimizer"].items() if key != "fused"}
    eight_bit = options("optimizer")["adamw8bit"]["_target_"]
    changed = spec.with_settings({"optimizer": {**chosen, "_target_": eight_bit}})
    if target_of(spec.optimizer) not in (torch.optim.AdamW, target_of(changed.optimizer)):
        raise UsageError(
            f"dreambooth got use_8bit_adam=true with optimizer._target_={chosen['_target_']}; give one of the two"
        )
    return changed


def prepare(spec: RunSpec) -> None:
    """Print the predicted peak memory, and draw missing class images; the other processes wait for them.

    Raises:
        UsageError: No model is given to start from, the data settings are invalid, or class images cannot be drawn.
    """
    model, base = spec.model, check_base(spec)
    prompts, folder, count = spec["data.class_prompts"], spec["class_data_dir"], spec["num_class_images"]
    if not is_first_process():
        if prompts:
            class_images.wait_for(folder, prompts, count)
        return
    spec.build("data", class_prompts=None)  # its constructor's checks would come after the drawing
    missing = missing_class_images(spec, base) if prompts else []
    predicted = predict_memory(spec)
    if predicted is not None:
        print("predicted peak of memory per process", *predicted.lines(), sep="\n  ")
    if model.is_ours and not spec["learn_token"]:
        described = model.describe()
        for captions in caption_groups(captioned_photos(spec, CaptionOptions.kept)):
            tell_of_trigger_word(described, captions, prompts)
    if base is not None and missing:
        draw_class_images(spec, missing, base)


def check_base(spec: RunSpec) -> str | None:
    """Return the name of the model that a run starts from; None if a resumed run does not tell.

    Raises:
        UsageError: It starts from random weights.
    """
    model = spec.model
    base: str | None = model.get("pretrained") or (None if model.is_ours else model.target)
    if spec.starts_from_lightning:
        base = str(spec["init_from"])
    if base is None and spec["init_from"] is None and spec.resume is None:
        raise UsageError(
            f"dreambooth got model.pretrained=null and no init_from, and a subject cannot be taught to the random "
            f"weights of {spec['model.architecture']}; expected a trained model; add model.pretrained=<hub id or "
            "folder>, or init_from=<run or pipeline folder>"
        )
    return base


def missing_class_images(spec: RunSpec, base: str | None) -> Sequence[class_images.MissingPicture]:
    """Return the class images that are still to be drawn.

    Args:
        spec: The run.
        base: Name of the model that it starts from; None if nothing names one.

    Raises:
        UsageError: The folder holds other pictures or cannot be written, or the model that would draw them is unknown.
    """
    folder, count, prompts = spec["class_data_dir"], spec["num_class_images"], spec["data.class_prompts"]
    try:
        check_writable(Path(folder))
    except OSError as error:
        name = "output_dir" if folder == f"{spec['output_dir']}-class-images" else "class_data_dir"
        raise UsageError(
            f"dreambooth got {name}={spec[name]}, and {folder} cannot be written ({error.strerror}); choose another "
            f"{name}=<folder>"
        ) from error
    missing = class_images.missing_pictures(folder, prompts, count, seed=spec["seed"])
    if base is not None:
        class_images.warn_of_other_models(folder, prompts, count, source=base)
    if not missing:
        log.info("class images: all %d are in %s", count, folder)
    elif base is None:
        raise UsageError(
            f"dreambooth got resume={spec['resume']} with {len(missing)} of {count} class images missing in {folder}, "
            "and no config.yaml that says which model the run started from; add model.pretrained=<that model>, which "
            "draws them"
        )
    return missing


def predict_memory(spec: RunSpec) -> Forecast | None:
    """Return the memory forecast of a run with one process per device; None if it depends on measurements in the run.

    It is computed from the sizes of the loaded pipeline.
    """
    if spec["learn_token"] or not spec.model.is_ours:
        return None
    pretrained, model = spec.model.get("pretrained"), spec.model.describe()
    has_files = pretrained is not None and not Path(pretrained, LORA_NAME).is_file()  # adapters need loaded weights
    settings = replace(
        run_of(spec, model, spec.num_processes),
        num_images=spec["num_class_images"] * spec["with_prior_preservation"] + 10,
        prior_batch_size=spec["sample_batch_size"] * spec["with_prior_preservation"],
        prior_dtype=getattr(torch, spec["prior_generation_precision"] or "bfloat16"),
        from_files=spec.can_defer and has_files,
    )
    forecaster = Forecaster(model, settings)
    footprint = engine_of(spec.strategy).footprint(forecaster.workload)
    return None if footprint is None else forecaster.forecast(footprint)


def draw_class_images(spec: RunSpec, missing: Sequence[class_images.MissingPicture], base: str) -> None:
    """Draw class images with the model that the run starts from, with its quantised base if it has one."""
    sampling: SamplingOptions = spec.build("sampling", batch_size=spec["sample_batch_size"])
    model = load_base(spec)
    log.info("class images: drawing %d of %d in %s", len(missing), spec["num_class_images"], spec["class_data_dir"])
    device = torch.device("cuda" if spec.cuda_devices else "cpu")
    precision = spec["prior_generation_precision"] or ("bfloat16" if device.type == "cuda" else "float32")
    if precision != "float32":
        dtype = getattr(torch, precision)
        for name, network in model.networks.items():  # a VAE that overflows in float16 is not cast
            kept = model.family.vae_dtype(network, dtype) if name == "vae" else dtype
            cast_(network, kept)
    if spec.lora is not None and spec.lora.base is not None and not spec.starts_from_lightning:  # that is quantised
        spec.lora.quantize_base_(model.denoiser, model.deferred.pop(model.family.denoiser, None))
    model.read_deferred(device)
    class_images.draw(model, missing, options=sampling, device=device, settings={"model": base})


def load_base(spec: RunSpec) -> LatentDiffusion:
    """Load the model that a run starts from, with deferred weights where possible.

    Raises:
        UsageError: The parts to train do not fit the model.
    """
    if spec.starts_from_lightning:  # its weights have the names of the training module
        return train.build_module(spec).latent_diffusion
    model = spec.load_model(deferred=["all"])
    train.wrap(spec, meta_twin(model))
    return model
