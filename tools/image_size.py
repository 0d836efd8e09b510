"""What the router's image weighs, layer by layer, without a container engine: `python -m tools.image_size [FOLDER]`.

Installs what deploy/docker/router.Dockerfile installs into a new virtual environment, by this Python and with the
versions of constraints.txt, adds the size of the base image, and fails above the limit. The environment stays in FOLDER
if it is named.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_BYTES = 400 * 10**6
BASE_BYTES = 150 * 10**6
"""python:3.12-slim, unpacked: `docker images` says 120 to 130 MB, depending on Debian's version; the rest is margin."""
_BUILD_TOOLS = ("pip", "setuptools")
_TIMEOUT_S = 900.0


def install(folder: Path) -> Path:
    """The environment that the image's first stage makes. Returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    pinned = ["install", "--no-cache-dir", "--constraint", str(ROOT / "constraints.txt")]
    with tempfile.TemporaryDirectory() as copied:
        source = copy_source(Path(copied))
        _run([*pip, *pinned, "setuptools"])
        _run([*pip, *pinned, "--no-build-isolation", f"{source}[otlp]"])
    _run([*pip, "uninstall", "--yes", *_BUILD_TOOLS])
    return python


def copy_source(to: Path) -> Path:
    """The files that git tracks: a build writes beside them, and must not do that in the working tree."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    subprocess.run(
        ["tar", "--create", "--null", "--files-from=-", f"--file={to / 'source.tar'}"],
        cwd=ROOT,
        input=tracked,
        check=True,
        timeout=60,
    )
    subprocess.run(["tar", "--extract", f"--file={to / 'source.tar'}"], cwd=to, check=True, timeout=60)
    return to


def size_of(folder: Path) -> int:
    """Bytes of all files below it. Links count nothing."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def table(environment: Path) -> tuple[str, int]:
    """The layers as text, and their sum in bytes."""
    layers = {"python:3.12-slim, at most": BASE_BYTES, "/opt/baton": size_of(environment)}
    total = sum(layers.values())
    lines = [f"{name:28}{size / 1e6:8.1f} MB" for name, size in {**layers, "sum": total}.items()]
    return "\n".join(lines), total


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        install(folder)
        text, total = table(folder)
    print(text)
    print(f"limit {LIMIT_BYTES / 1e6:.0f} MB: {'within' if total < LIMIT_BYTES else 'above'}")
    return 0 if total < LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
