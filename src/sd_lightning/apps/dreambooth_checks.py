"""DreamBooth's base model, and checks of its settings before time or memory is spent."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sd_lightning._conf.annotations import as_override
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps.preflight import is_resumed
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.data.sources.dreambooth import num_per_prompt
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.storage.new_folder import check_writable

log = logging.getLogger(__name__)

_COMMON_WORDS = set("a an the of in on at with photo photos picture image portrait drawing painting".split())
"""Words in captions that do not name the subject."""
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


def check_used(spec: RunSpec) -> None:
    """Check that the command line gives no settings whose switch is off.

    Raises:
        UsageError: It gives some, and does not give their switch.
    """
    for switch, names in _SWITCHES.items():
        unused = [name for name in names if name in spec.given and spec[name]]
        if unused and not spec[switch] and switch not in spec.given:  # an explicit switch=false is meant
            shown = " ".join(f"{name}={as_override(spec[name])}" for name in unused)
            raise UsageError(
                f"dreambooth got {shown}, which nothing uses without {switch}; add {switch}=true, or leave "
                f"{', '.join(unused)} out"
            )


def check_once(spec: RunSpec) -> None:
    """Check that the command line does not set the two names of one setting to different values.

    Raises:
        UsageError: It does.
    """
    for name, other in _SAME.items():
        values = spec[name], spec[other]
        if {name, other} <= spec.given and values[0] != values[1]:
            raise UsageError(
                f"dreambooth got {name}={values[0]} and {other}={values[1]}, two names of one setting; expected one of "
                f"them; leave {other} out"
            )


def check_folders(spec: RunSpec) -> None:
    """Check that the class images have a folder apart from the photos of the subject.

    Raises:
        UsageError: They have no folder, or one folder contains the other.
    """
    if spec["with_prior_preservation"] and not spec["class_data_dir"]:
        raise UsageError(
            "dreambooth got class_data_dir= without a value; expected a folder for the class images; leave "
            "class_data_dir out"
        )
    photos, pictures = (Path(spec[name]).resolve() for name in ("instance_data_dir", "class_data_dir"))
    if spec["with_prior_preservation"] and (photos.is_relative_to(pictures) or pictures.is_relative_to(photos)):
        how = "the same folder" if photos == pictures else "one inside the other"
        both = f"class_data_dir={spec['class_data_dir']} and instance_data_dir={spec['instance_data_dir']}"
        raise UsageError(
            f"dreambooth got {both}, {how}; expected two folders apart, or photos of the subject and pictures of its "
            "class are taken for each other; leave class_data_dir out, or choose another class_data_dir=<folder>"
        )


def check_base(spec: RunSpec) -> None:
    """Check that the run does not start from random weights.

    Raises:
        UsageError: No base model is given, and there is no run to resume.
    """
    if base_of(spec) is None and spec["init_from"] is None and not is_resumed(spec):
        raise UsageError(
            f"dreambooth got model.pretrained=null and no init_from, and a subject cannot be taught to the random "
            f"weights of {spec['model.architecture']}; expected a trained model; add model.pretrained=<hub id or "
            "folder>, or init_from=<run or pipeline folder>"
        )


def check_drawing(spec: RunSpec) -> None:
    """Check early what would otherwise fail only after class images have been drawn.

    Raises:
        UsageError: The data settings are invalid, or the class images cannot be written.
    """
    if not spec["with_prior_preservation"]:
        return
    spec.build("data", class_prompts=None)
    try:
        check_writable(Path(spec["class_data_dir"]))
    except OSError as error:
        name = "output_dir" if spec["class_data_dir"] == f"{spec['output_dir']}-class-images" else "class_data_dir"
        raise UsageError(
            f"dreambooth got {name}={spec[name]}, and {spec['class_data_dir']} cannot be written ({error.strerror}); "
            f"choose another {name}=<folder>"
        ) from error


def base_of(spec: RunSpec) -> str | None:
    """Return the name of the model that a run starts from; None if nothing names one."""
    return str(spec["init_from"]) if spec.starts_from_lightning else spec.model.name


def check_prompts(spec: RunSpec, captions: Sequence[str]) -> list[str]:
    """Check the settings of prior preservation against each other.

    Args:
        spec: The run.
        captions: Captions of the photos.

    Returns:
        The class prompts; none without prior preservation.

    Raises:
        UsageError: They contradict each other, or a caption has no word that tells the subject from its class.
    """
    if not spec["with_prior_preservation"]:
        return []
    stripped = (prompt.strip() for prompt in [spec["class_prompt"] or "", *spec["class_prompts"]])
    prompts = [prompt for prompt in stripped if prompt]
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
        is_told = spec["learn_token"] and not _has_word(
            prompt, spec["placeholder_token"]
        )  # every caption has the token
        if not is_told and not _words([caption]) - _words([prompt]):
            raise UsageError(
                f"dreambooth got instance_prompt={caption!r}, which has no word that tells the subject from its class "
                f"{prompt!r}; expected a rare word for the subject, such as sks: write "
                f"'instance_prompt={_with_token(caption, 'sks')}'"
            )
    return prompts


def check_token(token: str, captions: Sequence[str]) -> None:
    """Check that a new word is valid and in every caption.

    Raises:
        UsageError: It is not.
    """
    LearnedToken(token)  # raises if it is not a valid word
    for caption in captions:
        if not _has_word(caption, token):
            raise UsageError(
                f"dreambooth got learn_token=true and instance_prompt={caption!r} without the word {token}; write "
                f"'instance_prompt={_with_token(caption, token)}', or placeholder_token=<the word>"
            )


def warn_of_validation(spec: RunSpec, captions: Sequence[str], class_prompts: Sequence[str]) -> None:
    """Warn of a ``validation_prompt`` without a word for the subject: its pictures would show the class."""
    subject = _words(captions) - _words(class_prompts) - _COMMON_WORDS
    if class_prompts and subject and is_first_process() and not subject & _words([spec["validation_prompt"]]):
        log.warning(
            "validation_prompt=%r has none of the words for the subject (%s), so the pictures drawn during the run "
            "will show its class; write the word into it",
            spec["validation_prompt"],
            ", ".join(sorted(subject)),
        )


def _words(prompts: Iterable[str]) -> set[str]:
    return {word for prompt in prompts for word in re.findall(r"\w+", prompt.lower())}


def _has_word(prompt: str, word: str) -> bool:
    """Return whether a prompt contains a word, which may begin or end with non-letters."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt) is not None


def _with_token(prompt: str, token: str) -> str:
    head, _, last = prompt.rpartition(" ")
    return f"{head} {token} {last}".strip()
