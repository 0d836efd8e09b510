"""Dockerfiles, compose files and systemd units: flags and pages that there are, files to copy, stops that drain."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.settings import Settings
from deploy.command import SUBCOMMANDS
from node.settings import NodeSettings
from node.shell import GRACE_S, THREAD_STOP_S
from router.settings import RouterSettings
from tests.certificates import make_certificate
from tests.deploy.commands import parsed, put_file

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OURS = ("router", "prefill-0", "decode-0")
AFTER_DRAIN_S = 2 * GRACE_S + THREAD_STOP_S


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(name, arguments), with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def final_stage(dockerfile: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, arguments in instructions(dockerfile):
        found = {} if name == "FROM" else found
        found.setdefault(name, []).append(arguments)
    return found


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_small_unprivileged_and_stop_by_sigterm(dockerfile: Path) -> None:
    every, last = instructions(dockerfile), final_stage(dockerfile)
    assert [name for name, _ in every].count("FROM") == 2  # what builds is not shipped
    assert last["USER"] == ["10001:10001"]  # a number: Kubernetes checks that it is not root's
    assert last["STOPSIGNAL"] == ["SIGTERM"]
    (entry,) = last["ENTRYPOINT"]
    program, *subcommands = json.loads(entry)  # the exec form: signals reach baton, no shell
    assert program == "baton"
    assert set(subcommands) <= SUBCOMMANDS.keys()
    assert all("-c constraints.txt" in run for name, run in every if name == "RUN" and "pip install" in run)
    assert "pip install" not in " ".join(last.get("RUN", ()))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_not_ignored(dockerfile: Path) -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, arguments in instructions(dockerfile):
        if name != "COPY" or "--from=" in arguments:
            continue
        *sources, _ = [word for word in arguments.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists()
            assert source == "." or source.split("/")[0] in kept
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests", "tools"}
    assert packages | {"proto", "kernels", "pyproject.toml", "README.md", "LICENSE"} <= kept


def test_secrets_that_compose_reads_are_neither_committed_nor_copied_into_images() -> None:
    files = [secret["file"] for secret in COMPOSE["secrets"].values()]
    folders = {Path(file).parent.as_posix() for file in files}
    assert folders == {"secrets"}
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "!secrets" not in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.fixture(params=["plain", "TLS"])
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server whose /health answers 200, and whose other pages answer 503. The URL is that of an image's check."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    if request.param == "TLS":
        certificate, tls = make_certificate(tmp_path), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate.certfile, certificate.keyfile)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("path", "code"), [("/health", 0), ("/ready", 1)])
def test_the_health_check_exits_with_what_the_page_says(page: str, path: str, code: int) -> None:
    command = [sys.executable, "-m", "deploy.healthy", page + path]
    ran = subprocess.run(
        command, cwd=ROOT, env={"http_proxy": "http://127.0.0.1:1"}, capture_output=True, timeout=30, check=False
    )
    assert ran.returncode == code


def seconds(text: str) -> float:
    """Of compose's and Docker's durations."""
    return float(text.removesuffix("s"))


def checked_url(test: str | list[str]) -> str:
    words = json.loads(test) if isinstance(test, str) else test
    assert words[-4:-1] == ["python", "-m", "deploy.healthy"]
    return str(words[-1])


def compose_settings(service: str, folder: Path) -> Settings:
    for secret in COMPOSE["services"][service]["secrets"]:
        put_file(folder, f"/run/secrets/{secret}")
    command = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in COMPOSE["services"][service]["command"]]
    return parsed(command if service != "router" else ["router", *command], folder, {"BATON_METRICS_PORT": "9100"})


@pytest.mark.parametrize("service", OURS)
def test_compose_starts_commands_whose_flags_checks_and_stops_fit(service: str, tmp_path: Path) -> None:
    settings, about = compose_settings(service, tmp_path), COMPOSE["services"][service]
    url = checked_url(about["healthcheck"]["test"][1:])
    if isinstance(settings, RouterSettings):
        assert url == f"http://127.0.0.1:{settings.http.port}/ready"
        published = {int(port.split(":")[-1]) for port in about["ports"]}
        assert published == {settings.http.port, settings.grpc.port}
        assert {str(name) for name in (*settings.prefill_dns, *settings.decode_dns)} == {
            "prefill-0:9000",
            "decode-0:9000",
        }
        assert seconds(about["stop_grace_period"]) > settings.drain_timeout
    else:
        assert isinstance(settings, NodeSettings)
        assert url == f"http://127.0.0.1:{settings.metrics_listen.port}/health"
        assert settings.listen.is_wildcard
        assert str(settings.advertise) == f"{service}:9000"
        assert seconds(about["stop_grace_period"]) > settings.drain_timeout + AFTER_DRAIN_S
        assert "shm_size" in about
        assert about["tmpfs"] == ["/tmp:exec"]  # Triton loads from it; Docker's default is noexec
    assert about["read_only"]
    assert about["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in about.get("ports", ()))


def test_compose_names_what_it_has_and_mounts_files_that_there_are() -> None:
    for about in COMPOSE["services"].values():
        assert "healthcheck" in about
        assert set(about.get("secrets", ())) <= COMPOSE["secrets"].keys()
        assert set(about["networks"]) <= COMPOSE["networks"].keys()
        for volume in about.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]
        build = about.get("build")
        assert build is None or (ROOT / build["dockerfile"]).is_file()


def test_prometheus_and_grafana_find_what_compose_runs(tmp_path: Path) -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scraped for group in job["static_configs"] for target in group["targets"]}
    ports = {}
    for service in OURS:
        settings = compose_settings(service, tmp_path)
        listen = settings.http if isinstance(settings, RouterSettings) else settings.metrics_listen  # type: ignore[attr-defined]
        ports[service] = listen.port
    assert targets == {f"{service}:{port}" for service, port in ports.items()}
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "baton.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/baton.json" in mounted


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_images_own_checks_ask_for_pages_that_there_are(dockerfile: Path) -> None:
    (check,) = final_stage(dockerfile)["HEALTHCHECK"]
    url = checked_url(check.partition(" CMD ")[2])
    router = dockerfile.name == "router.Dockerfile"
    assert url == ("http://127.0.0.1:8000/health" if router else "http://127.0.0.1:9100/health")
    variables = " ".join(final_stage(dockerfile)["ENV"])
    assert router or "BATON_METRICS_PORT=9100" in variables


def unit(path: Path) -> dict[str, list[str]]:
    """The settings of a unit's [Service], each with all its values."""
    found: dict[str, list[str]] = {}
    section = path.read_text().partition("[Service]")[2].partition("[Install]")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_commands_whose_flags_there_are_and_drain(path: Path, tmp_path: Path) -> None:
    service = unit(path)
    program, *command = shlex.split(service["ExecStart"][0].replace("%i", "0"))
    assert program == "/opt/baton/bin/baton"
    for credential in service["LoadCredential"]:
        put_file(tmp_path, f"/creds/{credential.split(':')[0]}")
    words = shlex.split(" ".join(service["Environment"]).replace("%d", "/creds").replace("%i", "0"))
    variables = dict(word.split("=", 1) for word in words)
    needed = {"BATON_DECODE": "127.0.0.1:9001"} if command[0] == "router" else {"BATON_MODEL": "baton-tiny"}
    settings = parsed(command, tmp_path, {**variables, **needed})
    drain: float = settings.drain_timeout  # type: ignore[attr-defined]
    assert float(service["TimeoutStopSec"][0]) > drain + AFTER_DRAIN_S
    assert service["KillSignal"] == ["SIGTERM"]
    assert service["NoNewPrivileges"] == ["yes"]
    assert "LimitNOFILE" in service
    assert (service["ProtectSystem"], service["PrivateTmp"]) == (["strict"], ["yes"])  # the first makes /tmp read-only
    assert ("LimitMEMLOCK" in service) == (command[0] != "router")
    # either hides GPUs
    assert command[0] == "router" or not {"PrivateDevices", "ProtectClock"} & service.keys()


@pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    copies = []
    for path in UNITS:
        copy = tmp_path / path.name.replace("@.", "@0.")
        copy.write_text(path.read_text().replace("/opt/baton/bin/baton", sys.executable))
        copies.append(str(copy))
    command = [str(SYSTEMD_ANALYZE), "verify", "--man=no", *copies]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in ran.stderr.splitlines() if "baton" in line]
    assert not ours, ran.stderr


def test_the_file_for_gpus_changes_services_that_there_are() -> None:
    class Loader(yaml.SafeLoader):
        """Reads compose's own tags as what they stand before."""

    Loader.add_multi_constructor("!", lambda loader, tag, node: None)
    more = yaml.load((DEPLOY / "compose.gpu.yaml").read_text(), Loader)
    assert more["services"].keys() == set(OURS) - {"router"}
    devices = [about["deploy"]["resources"]["reservations"]["devices"] for about in more["services"].values()]
    assert len({each["device_ids"][0] for (each,) in devices}) == len(devices)
