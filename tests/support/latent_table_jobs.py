"""Jobs of ranks that encode images once, for `cache_latents`."""

import hashlib
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sd_lightning._errors import UsageError
from sd_lightning.data.latent_table import encode_source
from sd_lightning.data.transform import ImageOptions
from square_data import Squares


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Encode squares on every rank, which share a machine or have their own; return what this rank has and did."""
    rank = int(os.environ["RANK"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    squares: Any = Squares(job["num"], tuple(job["broken"]))
    encoded: list[int] = []

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if rank == job.get("fails"):
            raise UsageError("no memory left") if job["known"] else RuntimeError("no memory left")
        encoded.append(len(pixels))
        return torch.nn.functional.avg_pool2d(pixels, 4)

    encoder: Any = SimpleNamespace(encode_moments=encode)
    host = f"machine-{rank}" if job.get("apart") else "machine"
    with mock.patch("socket.gethostname", return_value=host), mock.patch("tempfile.tempdir", job["folder"]):
        images = ImageOptions(16, center_crop=True)
        try:
            table = encode_source(squares, encoder, images, device=torch.device("cpu"))
        except (UsageError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    used = table.usable(torch.arange(job["num"]))
    batch = table.batch(used, epoch=torch.zeros(job["num"]))
    digest = hashlib.sha256(b"".join(entry.numpy().tobytes() for entry in batch.values())).hexdigest()
    return {"digest": digest, "used": used, "bad": table.bad, "encoded": sum(encoded)}
