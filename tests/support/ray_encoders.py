"""Encoders and folders for processes of a Ray cluster."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lightning.storage.location import LocalFolder
from small_store import MeanEncoder


class ProcessNoting(MeanEncoder):
    """Notes in a folder which processes encode, and takes its time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def to(self, device: torch.device) -> None:
        (self.folder / f"{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        time.sleep(0.1)
        return super().encode_moments(pixel_values)


class Accompanied(ProcessNoting):
    """Encodes nothing before a second process has started, for at most a minute."""

    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        until = time.monotonic() + 60
        while len(list(self.folder.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        return super().encode_moments(pixel_values)


class Deadly(ProcessNoting):
    """Ends its process."""

    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        os._exit(7)


class DeadAtFirst(ProcessNoting):
    """Ends the first process while it starts."""

    def to(self, device: torch.device) -> None:
        super().to(device)
        if len(list(self.folder.iterdir())) == 1:
            os._exit(7)


class Failing(ProcessNoting):
    """Raises what no user has to mend."""

    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        raise RuntimeError("no memory\nat all")


class ElsewhereFolder(LocalFolder):
    """A folder that other processes have under the same path, but on a disk of their own."""

    def __reduce__(self) -> Any:
        return LocalFolder, (self.url, self.folder.with_name("elsewhere"), self.who)
