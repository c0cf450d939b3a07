"""Fill a folder with the wheels that a GPU machine without a network needs; list them, and say their size.

    python benchmarks/gpu_wheels.py .whl

`gpu-wheels.txt` names them. A machine that is lent by the hour takes little: more than `LIMIT_MIB` is an error.
"""

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
LIST, CONSTRAINTS = HERE / "gpu-wheels.txt", HERE.parent / "constraints.txt"
LIMIT_MIB = 60
"""The working tree travels with them, in 64 MiB."""
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)]
PLATFORMS += [f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
SLIMMED = {"bitsandbytes": re.compile(r"libbitsandbytes_(?!cuda13\d\.so|cpu\.so)\w+\.so$")}
"""Package -> files that are left out of its wheel: libraries for other CUDA releases, nine tenths of its size."""


def listed() -> tuple[list[str], list[str], set[str]]:
    """Return the requirements that have wheels, those that are built from source, and what the machine has."""
    wheels, sources, there = [], [], set()
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("there: "):
            there |= set(line.split()[1:])
        elif line.endswith("# source"):
            sources.append(line.removesuffix("# source").strip())
        elif line and not line.startswith("#"):
            wheels.append(line)
    return wheels, sources, there


def pip(*words: str) -> None:
    """Run pip; DeepSpeed compiles its kernels when they are first used, not here."""
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"make gpu-wheels: pip {words[0]} failed\n{done.stdout}{done.stderr}")


def fill(folder: Path) -> None:
    """Download and build all wheels of the list into a folder, in place of those in it."""
    wheels, sources, _ = listed()
    empty(folder)
    common = ["-q", "--disable-pip-version-check", "--no-deps", "-c", str(CONSTRAINTS)]
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip("download", *common, *target, "-d", str(folder), *wheels)
    pip("wheel", *common, "-w", str(folder), *sources)
    for path in folder.glob("*.whl"):
        for package, left_out in SLIMMED.items():
            if path.name.startswith(f"{package}-"):
                slim(path, left_out)


def empty(folder: Path) -> None:
    """Delete the wheels in a folder, or make it; one with anything else is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(folder.iterdir())
    if other := next((each for each in there if each.suffix != ".whl" or not each.is_file()), None):
        raise SystemExit(f"make gpu-wheels: {folder} has {other.name}, which is no wheel; give a folder of its own")
    for each in there:
        each.unlink()


def slim(wheel: Path, left_out: re.Pattern[str]) -> None:
    """Leave files out of a wheel; pip does not compare with its list of files."""
    with tempfile.TemporaryDirectory() as name:
        small = Path(name, wheel.name)
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as new:
            for each in old.infolist():
                if not left_out.search(each.filename):
                    new.writestr(each, old.read(each), zipfile.ZIP_DEFLATED)
        shutil.move(small, wheel)


def missing(wheels: Sequence[Path]) -> list[str]:
    """Return what the wheels need and neither they nor the machine have, as sentences."""
    have = listed()[2] | {canonicalize_name(path.name.partition("-")[0]) for path in wheels}
    found = []
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            (name,) = (each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
            about = email.message_from_bytes(archive.read(name))
        for text in about.get_all("Requires-Dist", []):
            needed = Requirement(text)
            applies = needed.marker is None or needed.marker.evaluate({"python_version": PYTHON, "extra": ""})
            if applies and canonicalize_name(needed.name) not in have:
                found.append(f"{path.name} needs {needed}")
    return found


def unusable(names: Sequence[str]) -> list[str]:
    """Return the wheels that do not run under the machine's Python."""
    tag = f"cp{PYTHON.replace('.', '')}"
    return [
        name for name in names if not re.search(rf"-(py\d(\.py\d)*-none-|{tag}-{tag}-|cp3\d+-abi3-)[^-]+\.whl$", name)
    ]


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the wheels in it are deleted first")
    folder = parser.parse_args(words).folder
    fill(folder)
    found = sorted(folder.glob("*.whl"))
    for path in found:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    total = sum(path.stat().st_size for path in found) / 2**20
    print(f"{total:6.1f} MiB  in {len(found)} wheels; the limit is {LIMIT_MIB}")
    lacking = [each for each in missing(found) if not each.startswith("colossalai-")]  # it names a whole old stack
    for each in lacking:
        print(f"make gpu-wheels: {each}; add it to benchmarks/gpu-wheels.txt", file=sys.stderr)
    if others := unusable([path.name for path in found]):
        print(f"make gpu-wheels: not for Python {PYTHON}: {', '.join(others)}", file=sys.stderr)
    if total > LIMIT_MIB:
        print("make gpu-wheels: too large; leave something out of benchmarks/gpu-wheels.txt", file=sys.stderr)
    return int(bool(lacking or others) or total > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
