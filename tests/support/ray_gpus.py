"""Four workers of latent stores on a Ray cluster that says it has two GPUs. Argument: a folder."""

import sys
from pathlib import Path

import ray

from ray_encoders import ProcessNoting
from sd_lightning._errors import UsageError
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.store.encoding import ShardEncoder, torch
from sd_lightning.remote.launchers import Ray
from sd_lightning.remote.precompute import reserve
from sd_lightning.storage.object_store import open_location
from small_store import recipe, write_pictures


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "notes").mkdir()
    ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, object_store_memory=2**28)
    root = open_location(folder / "store", key="store")
    encoder = ProcessNoting(folder / "notes")
    source = ImageFolder(write_pictures(folder / "photos", 1))
    shard = ShardEncoder({"train": source}, encoder, recipe(), root, torch.device("cpu"))
    try:
        reserve(Ray(num_workers=5, cpus_per_worker=0.5, gpus_per_worker=0.5), root)
        raise AssertionError("two GPUs have four halves")
    except UsageError as error:
        assert "asks for 2.5 GPU; the Ray cluster has 2" in str(error), error
    reserve(Ray(num_workers=4, cpus_per_worker=0.5, gpus_per_worker=0.5), root)(shard, texts=None).close()
    ray.shutdown()


if __name__ == "__main__":
    main()
