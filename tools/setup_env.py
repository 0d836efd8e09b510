"""Create .venv: a virtual environment with baton and its dependencies, at the versions of constraints.txt.

Run by `make setup` with the system's python3, so it uses only the standard library and syntax of Python 3.6, or it
could not report that it needs a newer one. It does nothing if .venv was created from the same files, and starts over
if an earlier run was interrupted.
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ready"  # the Makefile's target, with the fingerprint of what the environment was made from
LOG = ROOT / ".setup.log"  # exists while a run is active, or if one failed or was interrupted: .venv is then unusable
OLDEST = (3, 11)
INPUTS = ("pyproject.toml", "constraints.txt")

TURNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TURN_S = 0.1
LINE_EVERY_S = 20.0  # when stdout is not a terminal


def main() -> int:
    problem = unsupported()
    if problem:
        print(f"setup: {problem}", file=sys.stderr)
        return 2
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two concurrent runs, the second waits and finds all done
        wanted = fingerprint()
        if STAMP.exists() and STAMP.read_text() == wanted and usable():
            STAMP.touch()  # for make, which compares mtimes
            return 0
        return make(wanted)


def unsupported() -> "str | None":
    """Why baton cannot run here, or None."""
    if not sys.platform.startswith("linux"):
        return f"baton runs on Linux only, and this is {sys.platform}"
    if sys.version_info[:2] < OLDEST:
        newer = next((name for name in ("python3.13", "python3.12", "python3.11") if shutil.which(name)), None)
        hint = f"try: make setup PYTHON={newer}" if newer else "install one, then: make setup PYTHON=python3.11"
        return f"Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}; {hint}"
    return None


def fingerprint() -> str:
    """A digest of everything that determines what is installed."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest() + "\n"


def usable() -> bool:
    """Whether .venv has a working Python of this version, and no installation into it was interrupted."""
    if LOG.exists() or not PYTHON.exists():
        return False
    command = [str(PYTHON), "-c", "import sys, pip; print(sys.version_info[:2])"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() == str(tuple(sys.version_info[:2]))


def make(wanted: str) -> int:
    STAMP.unlink(missing_ok=True)
    extras = ".[node,nixl,dev]"
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    pinned = [*pip, "-c", "constraints.txt"]
    steps = [
        # the build backend first, also pinned, so that no separate build environment is needed
        ("build tools", [*pinned, "setuptools"]),
        ("baton and what it needs", [*pinned, "--no-build-isolation", "-e", extras]),
    ]
    if not usable():
        steps.insert(0, ("virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)]))
    print(f"setup: making {VENV.name} for Python {sys.version.split()[0]}; the first time takes a few minutes")
    began = time.monotonic()
    for title, command in steps:
        if not run(title, command):
            return 1
    STAMP.write_text(wanted)
    LOG.unlink()
    print(f"setup: ready after {time.monotonic() - began:.0f} s")
    return 0


def run(title: str, command: "list[str]") -> bool:
    """Run one step with a progress line. On failure, print all of its output."""
    began = time.monotonic()
    with LOG.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        code = follow(process, title, began)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code:
        clear_line()
        print(LOG.read_text(errors="replace"), file=sys.stderr)
        print(f"setup: failed ({title}, exit code {code}): {' '.join(command)}", file=sys.stderr)
        return False
    clear_line()
    print(f"setup: {title} ({time.monotonic() - began:.0f} s)")
    return True


def follow(process: "subprocess.Popen[bytes]", title: str, began: float) -> int:
    """Show the progress of the process until it ends; returns its exit code."""
    drawn = sys.stdout.isatty()
    said = began
    while True:
        try:
            return process.wait(timeout=TURN_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        line = f"setup: {title}, {doing()} {now - began:.0f} s"
        if drawn:
            width = shutil.get_terminal_size().columns - 3
            print(f"\r\x1b[K{TURNS[int((now - began) / TURN_S) % len(TURNS)]} {line[:width]}", end="", flush=True)
        elif now - said >= LINE_EVERY_S:
            said = now
            print(line, flush=True)


def clear_line() -> None:
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")


def doing() -> str:
    """What pip is doing, from the end of its output."""
    tail = LOG.read_text(errors="replace")[-4000:]
    last = ""
    for line in tail.splitlines():
        found = re.match(r"\s*(Collecting|Downloading|Installing collected|Building editable) ?(\S*)", line)
        if found:
            last = line.strip() if found.group(1) == "Downloading" else " ".join(found.groups())
    if last.startswith("Installing collected"):
        return "unpacking;"
    if last.startswith("Downloading"):
        return "downloading " + last.split(" ", 1)[1].rsplit("/", 1)[-1] + ";"
    return (last[0].lower() + last[1:] + ";") if last else ""


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next run starts where it makes sense", file=sys.stderr)
        code = 130
    sys.exit(code)
