"""``SDDataModule`` and its builder functions, the ``_target_`` of ``conf/data/*.yaml``."""

from sd_lightning.data.datamodule.builders import (
    digits_data,
    dreambooth_data,
    huggingface_data,
    image_folder_data,
    latents_data,
    parquet_data,
    paths_in,
    webdataset_data,
)
from sd_lightning.data.datamodule.module import SDDataModule

__all__ = [
    "SDDataModule",
    "digits_data",
    "dreambooth_data",
    "huggingface_data",
    "image_folder_data",
    "latents_data",
    "parquet_data",
    "paths_in",
    "webdataset_data",
]
