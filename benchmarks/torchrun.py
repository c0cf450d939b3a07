"""Run a script of this folder on several processes of one thread each."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def torchrun(script: str, world_size: int, *arguments: object) -> dict[str, Any]:
    """Run `script RESULTS.json ARGUMENTS …` by torchrun over gloo; return what rank 0 wrote to RESULTS.json."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world_size}", str(HERE / script), str(results), *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, env=environment, stdout=sys.stderr)  # stdout carries the result
        if done.returncode != 0:
            raise RuntimeError(f"{script} ended with {done.returncode}; see above")
        found: dict[str, Any] = json.loads(results.read_text())
        return found
