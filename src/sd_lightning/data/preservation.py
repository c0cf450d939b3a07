"""Captions for which training keeps what the model predicts: those of a subject's class, or the empty one.

The loss of their predictions is that of "differential output preservation" and "blank prompt preservation" in
ostris' ai-toolkit: the distance to what the network predicts without adapters, at the same noisy latents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sd_lightning._errors import UsageError

_EXAMPLE = "'preservation.words={sks dog:dog}'"


@dataclass(frozen=True)
class Preservation:
    """For which captions predictions stay those of the model without adapters, and what that counts.

    Raises:
        UsageError: Captions are given in no way or in two, or a value is out of range.
    """

    words: Mapping[str, str] | None = None
    """Words of captions -> those of the class in their place."""
    prompts: Sequence[str] = ()
    """Captions of which one is drawn for each sample and epoch, in place of its own with other words."""
    weight: float = 1.0
    """Of this loss, beside that of the samples' own captions."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UsageError(
                f"preservation.weight={self.weight}: expected a number above 0; write preservation.weight=1, or "
                "preservation=none"
            )
        if bool(self.words) == bool(self.prompts):
            raise UsageError(
                f"preservation got {'both words and' if self.words else 'neither words nor'} prompts; expected one of "
                f"the two: write {_EXAMPLE}, or captions of the class: 'preservation.prompts=[a photo of a dog]'"
            )
        for word, other in (self.words or {}).items():
            if not word.strip() or self._pattern.search(other):
                raise UsageError(
                    f"preservation.words={{{word}:{other}}}: expected the words of the subject, and words of its class "
                    f"that have none of them; write {_EXAMPLE}"
                )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Finds the longest of the words; they may begin or end with non-letters."""
        return re.compile("|".join(map(_whole, sorted(self.words or (), key=len, reverse=True))))

    @property
    def is_blank(self) -> bool:
        """Whether the empty caption is the only one, which stores of text embeddings have, too."""
        return not any(self.prompts) and not self.words

    def caption(self, caption: str, draw: float) -> str:
        """Return the caption of the class for a sample.

        Args:
            caption: The sample's own.
            draw: Uniform in [0, 1).
        """
        if self.prompts:
            return self.prompts[int(draw * len(self.prompts))]
        words = self.words or {}
        return " ".join(self._pattern.sub(lambda found: words[found[0]], caption).split())

    def check(self, captions: Iterable[str], *, token: str | None = None) -> None:
        """Check that captions have words to replace, and that those of the class do not have a learned word.

        Args:
            captions: What samples' captions have in every epoch.
            token: The learned word, if there is one.

        Raises:
            UsageError: A caption has none, or one of the class has the learned word.
        """
        for caption in captions if self.words else self.prompts:
            if self.words and not self._pattern.search(caption):
                raise UsageError(
                    f"preservation.words: none of {', '.join(self.words)} is always in the caption {caption!r}, which "
                    "would itself be preserved; expected one in every caption; write them as captions do, or "
                    "'preservation.prompts=[a photo of a dog]'"
                )
            kept = self.caption(caption, 0.0) if self.words else caption
            if token is not None and re.search(_whole(token), kept):
                raise UsageError(
                    f"preservation got the caption {kept!r} and learn_token=true, whose word {token} means nothing "
                    f"without training; expected captions without it; write 'preservation.words={{{token}:\"\"}}', "
                    "which leaves it out, or other preservation.prompts"
                )


def check_adapters(preservation: object | None, lora: object | None) -> None:
    """Check that where something is preserved, there are adapters to do without.

    Raises:
        UsageError: There are none.
    """
    if preservation is not None and lora is None:
        raise UsageError(
            "preservation needs adapters, without which the model predicts what it is held to, and all weights are "
            "trained; write trainable=lora, or preservation=none (and in dreambooth with_prior_preservation=true)"
        )


def _whole(word: str) -> str:
    return rf"(?<!\w){re.escape(word)}(?!\w)"
