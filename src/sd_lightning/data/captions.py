"""How captions are written for a step: a text around them, wildcards, and tags in another order or left out.

What is random here depends on numbers that the caller draws for the sample and the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sd_lightning._errors import UsageError

_IDLE = "it has no effect while tags stay; add data.shuffle_tags=true or data.tag_dropout=0.1, or leave it out"
_WILDCARD = re.compile(r"\{([^{}]*\|[^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class CaptionOptions:
    """How captions are written.

    Raises:
        UsageError: A value is out of range, or has no effect.
    """

    caption_prefix: str = ""
    """Text before every caption; it is no tag, and stays where it is."""
    caption_suffix: str = ""
    """Text behind every caption."""
    enable_wildcard: bool = False
    """Write one of ``a`` and ``b`` for ``{a|b}`` in a caption, another one in each epoch."""
    shuffle_tags: bool = False
    """Put the tags of a caption in another order in every epoch."""
    tag_dropout: float = 0.0
    """Fraction of the tags that is left out, others in every epoch."""
    keep_tags: int = 0
    """Number of tags at the beginning that stay where they are."""
    tag_separator: str = ","
    """What stands between tags."""

    def __post_init__(self) -> None:
        for name, is_valid, remedy in (
            ("tag_dropout", 0 <= self.tag_dropout <= 1, "expected a fraction in [0, 1]; write data.tag_dropout=0.1"),
            ("keep_tags", self.keep_tags >= 0, "expected 0 or more; write data.keep_tags=1"),
            ("tag_separator", self.tag_separator.strip(), "expected a text; write 'data.tag_separator=\";\"'"),
            ("keep_tags", self.has_tags or not self.keep_tags, _IDLE),
            ("tag_separator", self.has_tags or self.tag_separator == ",", _IDLE),
        ):
            if not is_valid:
                raise UsageError(f"data.{name}={getattr(self, name)!r}: {remedy}")

    @property
    def has_tags(self) -> bool:
        """Whether captions are tags that do not stay as they are."""
        return self.shuffle_tags or self.tag_dropout > 0

    @property
    def changed_captions(self) -> str | None:
        """The first setting that has captions written otherwise than they are, as an override; None without."""
        for name in ("caption_prefix", "caption_suffix", "enable_wildcard", "shuffle_tags", "tag_dropout"):
            if value := getattr(self, name):
                return f"data.{name}={str(value).lower() if value is True else value}"
        return None

    def num_draws(self, caption: str) -> int:
        """Return how many random numbers :meth:`written` takes at most."""
        if not (self.has_tags or self.enable_wildcard):
            return 0
        return caption.count("{") + 2 * (caption.count(self.tag_separator) + 1)

    def kept(self, caption: str) -> str:
        """Return what is in a caption in every epoch."""
        options = replace(self, tag_dropout=float(self.tag_dropout > 0))
        return options.written(caption, [0.0] * self.num_draws(caption))

    def written(self, caption: str, draws: Sequence[float] = ()) -> str:
        """Return a caption as the model is to read it.

        Args:
            caption: As the data have it.
            draws: Uniform in [0, 1), :meth:`num_draws` or more. Without any, nothing is random: all tags are there in
                their order, and the first choice of each wildcard.
        """
        numbers = iter(draws)
        if self.enable_wildcard:
            # Every alternative counts once: "{a|a|b}" is "a" twice as often as "b".
            caption = _WILDCARD.sub(lambda found: _choice(found[1].split("|"), next(numbers, 0.0)), caption)
        if self.has_tags and draws:
            tags = [tag.strip() for tag in caption.split(self.tag_separator)]
            kept, others = tags[: self.keep_tags], [tag for tag in tags[self.keep_tags :] if tag]
            drawn = [(next(numbers), next(numbers), tag) for tag in others]
            drawn = [each for each in drawn if each[0] >= self.tag_dropout]
            if self.shuffle_tags:
                drawn.sort(key=lambda each: each[1])
            caption = f"{self.tag_separator.strip()} ".join([*kept, *(tag for _, _, tag in drawn)])
        behind = "" if re.match(r"\s*[,.;:!?]", self.caption_suffix) else " "
        return f"{self.caption_prefix.rstrip()} {caption}{behind}{self.caption_suffix.lstrip()}".strip()


def _choice(choices: Sequence[str], number: float) -> str:
    return choices[int(number * len(choices))].strip()
