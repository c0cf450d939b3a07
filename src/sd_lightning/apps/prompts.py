"""What the captions of the photos and the prompts of the class have to say in DreamBooth."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.data.dreambooth import num_per_prompt
from sd_lightning.models.adapters.learned_token import LearnedToken

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

_COMMON_WORDS = set("a an the of in on at with photo photos picture image portrait drawing painting".split())
"""What captions say beside the subject."""


def check_prompts(cfg: DictConfig, captions: Sequence[str]) -> list[str]:
    """Check the settings of prior preservation against each other.

    Args:
        cfg: The configuration.
        captions: What the photos are captioned with.

    Returns:
        The class prompts; none without prior preservation.

    Raises:
        UsageError: They contradict each other, or a caption does not tell the subject from its class.
    """
    if not cfg.with_prior_preservation:
        return []
    stripped = (prompt.strip() for prompt in [cfg.class_prompt or "", *cfg.class_prompts])
    prompts = [prompt for prompt in stripped if prompt]
    if not prompts:
        raise UsageError(
            "dreambooth got with_prior_preservation=true without a class prompt; expected what the subject is one of: "
            "write 'class_prompt=a photo of a dog', or several with 'class_prompts=[a photo of a dog, a dog outdoors]'"
        )
    for name in ("num_class_images", "sample_batch_size"):
        if cfg[name] < 1:
            raise UsageError(f"dreambooth got {name}={cfg[name]}; expected at least 1; write {name}=100")
    without = [prompt for prompt, count in num_per_prompt(prompts, cfg.num_class_images).items() if not count]
    if without:
        raise UsageError(
            f"dreambooth got num_class_images={cfg.num_class_images}, of which none is left for {without[0]!r}; "
            f"expected one for each of class_prompts; write num_class_images={len(prompts)}"
        )
    for caption, prompt in ((c, p) for c in captions for p in prompts):
        is_told = cfg.learn_token and not _has_word(prompt, cfg.placeholder_token)  # every caption has it
        if not is_told and not _words([caption]) - _words([prompt]):
            raise UsageError(
                f"dreambooth got instance_prompt={caption!r}, which has no word that tells the subject from its class "
                f"{prompt!r}; expected a rare word for the subject, such as sks: write "
                f"'instance_prompt={_with_token(caption, 'sks')}'"
            )
    return prompts


def check_token(token: str, captions: Sequence[str]) -> None:
    """Refuse a new word that is none, or is not in every caption.

    Raises:
        UsageError: It is so.
    """
    LearnedToken(token)  # which says what is no word
    for caption in captions:
        if not _has_word(caption, token):
            raise UsageError(
                f"dreambooth got learn_token=true and instance_prompt={caption!r} without the word {token}; write "
                f"'instance_prompt={_with_token(caption, token)}', or placeholder_token=<the word>"
            )


def warn_of_validation(cfg: DictConfig, captions: Sequence[str]) -> None:
    """Warn of a ``validation_prompt`` without a word for the subject: its pictures would not show it."""
    subject = _words(captions) - _words(cfg.data.class_prompts) - _COMMON_WORDS
    if cfg.data.class_prompts and subject and is_first_process() and not subject & _words([cfg.validation_prompt]):
        log.warning(
            "validation_prompt=%r has none of the words for the subject (%s), so the pictures drawn during the run "
            "will show its class; write the word into it",
            cfg.validation_prompt,
            ", ".join(sorted(subject)),
        )


def _words(prompts: Iterable[str]) -> set[str]:
    return {word for prompt in prompts for word in re.findall(r"\w+", prompt.lower())}


def _has_word(prompt: str, word: str) -> bool:
    """Return whether a word, which may begin and end with other signs than letters, stands in a prompt."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt) is not None


def _with_token(prompt: str, token: str) -> str:
    head, _, last = prompt.rpartition(" ")
    return f"{head} {token} {last}".strip()
