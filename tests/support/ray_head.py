"""A Ray cluster of one node for a whole test run: started by the first test that asks, ended with the run.

Started as a script it is that node: it writes its address, and ends when the process that the tests belong to does.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock

NUM_CPUS = 8
"""Logical CPUs: more than the machine has, since each actor reserves one."""
_START_SECONDS = 180


def address_of(folder: Path, owner: int) -> str:
    """Return the address of the run's cluster, and start it if nobody has.

    Args:
        folder: A folder that all test processes of the run share.
        owner: The process with which the cluster ends.
    """
    file = folder / "ray-address"
    with FileLock(folder / "ray-lock"):
        if not file.exists():
            with open(folder / "ray-head.log", "wb") as log:
                command = [sys.executable, __file__, str(file), str(owner)]
                head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            end = time.monotonic() + _START_SECONDS
            while not file.exists():
                assert head.poll() is None, (folder / "ray-head.log").read_text()
                assert time.monotonic() < end, f"Ray did not start in {_START_SECONDS} s"
                time.sleep(0.2)
    return file.read_text()


def main(file: Path, owner: int) -> None:
    import psutil
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    context = ray.init(
        address="local", num_cpus=NUM_CPUS, include_dashboard=False, object_store_memory=2**28, resources={"encoder": 8}
    )
    tmp = file.with_suffix(".tmp")
    tmp.write_text(context.address_info["gcs_address"])
    tmp.rename(file)
    while psutil.pid_exists(owner):
        time.sleep(1)
    ray.shutdown()


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main(Path(sys.argv[1]), int(sys.argv[2]))
