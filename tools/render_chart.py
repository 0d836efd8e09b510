"""Render the Helm chart as the tests read it: `python -m tools.render_chart`, with `helm` on the PATH or in $HELM.

Most machines have no helm, so what it makes of the chart is in the repository (tests/deploy/rendered), with a digest
of the chart and the values in its first line: tests see without helm that a file is stale. Alerts and dashboard are
left out there: they change without the chart.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "baton"
RENDERED = ROOT / "tests" / "deploy" / "rendered"
RELEASE, NAMESPACE = "baton", "serving"
VALUES: dict[str, Path] = {
    "default": CHART / "values.yaml",
    "tiny": CHART / "values-tiny.yaml",
    "gpu": CHART / "values-gpu.yaml",
    "everything": ROOT / "tests" / "deploy" / "values-everything.yaml",
    "hosts": ROOT / "tests" / "deploy" / "values-hosts.yaml",
    "groups": ROOT / "tests" / "deploy" / "values-groups.yaml",
}
_STUBS = {"alerts.yml": "groups: []\n", "dashboard.json": "{}\n"}
_TIMEOUT_S = 60.0


def find_helm() -> str | None:
    return shutil.which(os.environ.get("HELM", "helm"))


def digest(name: str) -> str:
    """Of all that decides what helm renders."""
    files = sorted(path for path in CHART.rglob("*") if path.is_file() and path.name not in _STUBS)
    parts = [part for path in [*files, VALUES[name]] for part in (path.name.encode(), path.read_bytes())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def head(name: str) -> str:
    return f"# Made by `python -m tools.render_chart`; of the chart and its values: {digest(name)}\n"


def render(helm: str, values: Path) -> str:
    """The chart without its alerts and dashboard. Raises CalledProcessError with helm's words in `stderr`."""
    with tempfile.TemporaryDirectory() as temporary:
        chart = shutil.copytree(CHART, Path(temporary) / CHART.name, symlinks=True)
        for name, text in _STUBS.items():
            (chart / "files" / name).unlink()
            (chart / "files" / name).write_text(text)
        return template(helm, chart, values)


def template(helm: str, chart: Path, values: Path) -> str:
    command = [helm, "template", RELEASE, str(chart), "--namespace", NAMESPACE, "--values", str(values)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return "".join(line.rstrip() + "\n" for line in ran.stdout.splitlines())


def main() -> int:
    helm = find_helm()
    if helm is None:
        print("render_chart: no helm on the PATH, and none in $HELM", file=sys.stderr)
        return 1
    RENDERED.mkdir(exist_ok=True)
    for name, values in VALUES.items():
        (RENDERED / f"{name}.yaml").write_text(head(name) + render(helm, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
