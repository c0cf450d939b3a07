"""What is measured on a model's pictures, checked against the data and the feature network before any is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sd_lightning._errors import UsageError, check_at_least
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.source import Source
from sd_lightning.models.image_features import ImageFeatures, read_image_features

METRICS = ("fid", "kid", "clip_score")
_FEWEST = 10
"""Pictures without which nothing is measured on them."""


@dataclass
class EvaluationOptions:
    """What is measured; ``conf/evaluate.yaml`` explains the keys."""

    metrics: list[str] = field(default_factory=list)
    features: str | None = None
    num_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if {*self.metrics} - {*METRICS}:
            raise UsageError(
                f"evaluate got metrics=[{','.join(self.metrics)}]; expected some of {', '.join(METRICS)}; caption gap "
                "and prompted accuracy are measured anyway; write 'metrics=[kid]'"
            )
        check_at_least("evaluate", _FEWEST, num_samples=_FEWEST if self.num_samples is None else self.num_samples)
        check_at_least("evaluate", 0, seed=self.seed)
        if self.metrics and self.features is None:
            raise UsageError(
                f"evaluate got metrics=[{','.join(self.metrics)}] and no network; expected a vision model of the hub "
                "or a folder, or a file of Inception weights; write features=openai/clip-vit-base-patch32"
            )
        if self.features is not None and not self.metrics:
            raise UsageError(
                f"evaluate got features={self.features} and no metric that reads them; add 'metrics=[kid]', or leave "
                "features out"
            )

    def read_features(self, data: SDDataModule, device: torch.device) -> ImageFeatures | None:
        """Return the feature network; None if no metric needs one.

        Raises:
            UsageError: It cannot be read, or not with these metrics; or there are too few pictures for a metric, or
                none that are held out.
        """
        source = held_out(data)
        if self.features is None:
            return None
        drawn, metrics = self.num_samples or len(source), f"metrics=[{','.join(self.metrics)}]"
        distances, few = {"fid", "kid"} & {*self.metrics}, min(drawn, len(source))
        if distances and source.latents is not None:
            raise UsageError(
                f"evaluate got {metrics} and held-out images of a latent store, which has no pictures to compare with; "
                "add data=images data.train_data_dir=<folder>, or write 'metrics=[clip_score]'"
            )
        given = f"evaluate got {metrics} with {drawn} pictures and {len(source)} held-out images"
        if few < _FEWEST:
            raise UsageError(f"{given}; expected at least {_FEWEST} of both; add data=<data> with more of them")
        features = read_image_features(self.features, device=device)
        if "clip_score" in self.metrics and features.tokenizer is None:
            raise UsageError(
                f"evaluate got {metrics} with features={self.features}, which reads no captions; write clip_score in a "
                "call of its own, with features=openai/clip-vit-base-patch32: the pictures are kept"
            )
        if "fid" in self.metrics and few <= features.num_features:
            raise UsageError(
                f"{given}; {features.metric('F')} needs more than the {features.num_features} features of "
                f"{self.features}, of both; write kid in place of fid: it has no bias with few"
            )
        return features


def held_out(data: SDDataModule) -> Source:
    """Return the held-out images.

    Raises:
        UsageError: There are none.
    """
    if data.source_val is None:
        raise UsageError(
            "evaluate got data of which nothing is held out; expected captioned pictures that the model has not seen; "
            "add data=images data.train_data_dir=<folder of those> data.val_data_dir=<the same>"
        )
    return data.source_val
