"""`python -m sd_lightning.precompute` killed many times for one import: each job is a fork of this process.

Arguments: folder, number of workers, number of kills. In the folder, ``photos`` are encoded into ``undisturbed`` and
into ``disturbed-0``, ``disturbed-1``, …, whose jobs are killed with their workers at random times. Printed at the end,
as JSON: how many jobs were killed, the most latent files that one kill cut off, and how many were encoded that existed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool does not survive a fork

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

import sd_lightning.apps.precompute  # noqa: E402, F401
import sd_lightning.data.builders  # noqa: E402, F401
from sd_lightning import _conf, precompute  # noqa: E402
from sd_lightning.data.store.encoding import Encoded, EncodeTask, ShardEncoder  # noqa: E402

NUM_PHOTOS = 400


def main() -> None:
    folder, workers, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    photos = folder / "photos"
    photos.mkdir()
    for i in range(NUM_PHOTOS):
        pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).resize((128, 128)).save(photos / f"{i:03}.png")
        (photos / f"{i:03}.txt").write_text(f"picture {i}")
    note_encoded(folder / "begun")
    arguments = ["data=images", f"data.train_data_dir={photos}", "data.resolution=128", "data.center_crop=true"]
    arguments += ["shard_mb=0.05", f"workers={workers}"]
    begin = time.monotonic()
    assert run([*arguments, f"store={folder}/undisturbed"], folder, None)
    whole = time.monotonic() - begin
    random, killed, most, again, stores = np.random.default_rng(workers), 0, 0, 0, 0
    while True:
        store = folder / f"disturbed-{stores}"
        before = latent_files(store)
        (folder / "begun").write_text("")
        seconds = None if killed == kills else float(random.uniform(0, whole))
        is_done = run([*arguments, f"store={store}"], folder, seconds)
        begun = set((folder / "begun").read_text().split())
        again += len(begun & before)
        if is_done:
            stores += 1
            if killed == kills:
                break
        else:
            killed += 1
            most = max(most, len(begun - latent_files(store)))
    print(json.dumps({"killed": killed, "most_cut_off": most, "encoded_again": again, "stores": stores}))


def note_encoded(path: Path) -> None:
    """Append the name of every latent file that is begun to a file."""
    encode = ShardEncoder.__call__

    def noting(self: ShardEncoder, task: EncodeTask) -> Encoded:
        with open(path, "a") as file:
            file.write(f"{task.name(self.recipe)}\n")
        return encode(self, task)

    ShardEncoder.__call__ = noting  # type: ignore[method-assign]


def latent_files(store: Path) -> set[str]:
    return {path.stem for path in store.rglob("latents/*.safetensors")}


def run(arguments: list[str], folder: Path, seconds: float | None) -> bool:
    """Run a job in a process group of its own; return whether it ended before it was killed."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        output = os.open(folder / "output.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv[1:] = arguments
        code = 1
        try:
            _conf.main(precompute.PROGRAM)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            os._exit(code)
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, 0 if until is None else os.WNOHANG)
        if ended:
            assert status == 0, (folder / "output.log").read_text()
            return True
        if until is not None and time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.002)


if __name__ == "__main__":
    main()
