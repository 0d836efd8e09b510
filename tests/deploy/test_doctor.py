"""`baton doctor` finds a planted fault of each kind, and none on a machine that has none."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from baton.address import HostPort
from baton.process import resources
from deploy.doctor import clocks, files, gpus, limits, main, report, transports, versions
from deploy.doctor.certificates import validities
from deploy.doctor.child import ChildFailed, call
from deploy.doctor.finding import Finding, failure, ok
from deploy.doctor.gpus import Gpu, TorchView
from deploy.doctor.settings import CERTIFICATES, SECRETS, DoctorSettings
from kv_transfer.transports.ucx.path import Machine, no_rdma
from tests.certificates import Certificate, make_certificate

GIB = 1 << 30
SMI = "0, NVIDIA H200, 575.57, 143771, 4, Enabled\n1, NVIDIA H200, 575.57, 143771, 100000, Disabled\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def verdicts(findings) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in findings}


# ---- versions ----


def test_installed_versions_are_compared_with_the_declared_ones():
    declared = [*map(Requirement, ("torch>=2.11,<3", "ucxx-cu13>=0.52,<0.53", "triton>=3.6"))]
    there: dict[str, str | None] = {"torch": "2.11.0+cu130", "ucxx-cu13": "0.53.1"}
    found = {finding.check: finding for finding in versions.node_packages(declared, there.get)}
    assert verdicts(found.values()) == {"torch": "ok", "ucxx-cu13": "failure", "triton": "failure"}
    assert found["ucxx-cu13"].found == "ucxx-cu13 0.53.1 is not within <0.53,>=0.52."
    assert found["triton"].found == "triton is not installed."


def test_a_router_needs_no_torch():
    [finding] = versions.node_packages([Requirement("torch>=2")], lambda _: None)
    assert finding.verdict == "skipped"


def test_this_installation_is_as_declared():
    found = [*versions.findings()]
    assert {finding.verdict for finding in found} == {"ok"}
    assert {"python", "baton", "packages", "torch", "ucxx-cu13"} <= {finding.check for finding in found}
    assert "nixl-cu13" not in {finding.check for finding in found}  # an extra that a node does without


def test_planted_versions_are_found(monkeypatch):
    real = importlib.metadata.version
    planted = {"torch": "1.0", "grpcio": "1.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: planted.get(name) or real(name))
    found = verdicts(versions.findings())
    assert (found["torch"], found["packages"], found["transformers"]) == ("failure", "failure", "ok")
    assert versions.python("3.9.1", ">=3.11").verdict == "failure"
    assert versions.baton_version("0.2.0", "0.1.0").verdict == "failure"


# ---- GPUs ----


def test_a_clean_machine_with_gpus():
    listed = gpus.parse(SMI)
    view = TorchView("13.0", ((9, 0), (9, 0)))
    assert gpus.visible(listed, "", view, "auto").verdict == "ok"
    assert [gpus.memory(gpu).verdict for gpu in listed] == ["ok", "warning"]
    assert [gpus.persistence(gpu).verdict for gpu in listed] == ["ok", "warning"]
    assert gpus.capable(0, (9, 0)).verdict == "ok"
    assert gpus.peer_access(2, ()).verdict == "ok"


@pytest.mark.parametrize(
    ("view", "device", "verdict", "says"),
    [
        (TorchView(""), "auto", "failure", "is for CPUs"),
        (TorchView("13.0"), "auto", "failure", "torch sees none"),
        (TorchView("13.0", error="driver too old"), "auto", "failure", "driver too old"),
        (TorchView(""), "cpu", "skipped", "CPU"),
    ],
)
def test_gpus_that_torch_cannot_use(view, device, verdict, says):
    found = gpus.visible([Gpu("0", "H200", "1", 1, 0, "Enabled")], "", view, device)
    assert found.verdict == verdict
    assert says in found.found


def test_without_gpus_it_is_skipped_and_told():
    assert gpus.visible([], "there is no nvidia-smi", TorchView(""), "auto").verdict == "skipped"
    assert gpus.visible([], "there is no nvidia-smi", TorchView(""), "cuda").verdict == "failure"
    assert gpus.capable(0, (7, 5)).verdict == "warning"
    assert gpus.peer_access(2, ((0, 1), (1, 0))).verdict == "warning"


def test_nvidia_smi_that_fails_is_quoted(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    listed, reason = gpus.list_gpus()
    assert (listed, "version mismatch" in reason) == ([], True)


# ---- transports ----


def test_a_package_that_is_missing_or_broken(monkeypatch):
    monkeypatch.setattr(transports, "why_no_transport", lambda name, _: "nixl needs it" if name == "nixl" else None)
    monkeypatch.setattr(transports, "call", lambda *_: "UCX cannot be loaded: libucp.so.0: no such file")
    assert transports.transport("nixl", False, "cpu", None).verdict == "skipped"
    assert transports.transport("nixl", True, "cpu", None).verdict == "failure"
    broken = transports.transport("ucx", True, "cpu", None)
    assert (broken.verdict, "libucp.so.0" in broken.found) == ("failure", True)
    assert transports.transport("ucx", False, "cpu", None).verdict == "warning"


def test_a_library_that_cannot_be_loaded_is_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "ucxx", None)  # as if it were not there
    assert "UCX cannot be loaded" in (transports.why_not("ucx", "cpu", None) or "")


def test_a_transport_without_its_interface_is_told_and_one_that_works_is_not():
    assert transports.why_not("ipc", "cpu", "no-such0") == "there is no network interface no-such0"
    assert transports.why_not("ipc", "cpu", None) is None


def test_a_transport_that_kills_its_process_is_a_finding(monkeypatch):
    def dies(*_: object) -> None:
        raise ChildFailed("the process died of SIGSEGV")

    monkeypatch.setattr(transports, "call", dies)
    found = transports.transport("ipc", True, "cpu", None)
    assert (found.verdict, "SIGSEGV" in found.found) == ("failure", True)


def test_rdma_that_ucx_cannot_use_is_warned_of(monkeypatch):
    machine = Machine(False, True, "", frozenset({"tcp/eth0"}), GIB, ("mlx5_0",))
    monkeypatch.setattr(transports, "rdma_devices", lambda: ("mlx5_0",))
    monkeypatch.setattr(transports, "call", lambda *_: no_rdma(machine))
    found = transports.rdma("ucx", "cpu")
    assert (found.verdict, "mlx5_0" in found.found) == ("warning", True)
    assert transports.rdma("nixl", "cpu").verdict == "ok"
    machine = dataclasses.replace(machine, resources=frozenset({"rc_mlx5/mlx5_0:1", "tcp/eth0"}))
    assert transports.rdma("ucx", "cpu").verdict == "ok"


def test_a_child_that_dies_hangs_or_raises():
    assert call(math.sqrt, 30.0, 4.0) == 2.0
    with pytest.raises(ChildFailed, match="SIGKILL"):
        call(signal.raise_signal, 30.0, signal.SIGKILL)
    with pytest.raises(ChildFailed, match=r"within 0\.1 s"):
        call(time.sleep, 0.1, 60.0)
    with pytest.raises(ChildFailed, match="ValueError: "):
        call(math.sqrt, 30.0, -1.0)


# ---- clocks ----


def test_clocks():
    assert clocks.monotonic(1e-9).verdict == "ok"
    assert clocks.monotonic(0.016).verdict == "warning"
    assert clocks.synchronised(True, 0.01).verdict == "ok"
    assert clocks.synchronised(False, 16.0).verdict == "warning"
    assert clocks.synchronised(None, 0.0).verdict == "skipped"
    assert clocks.offset(0.02, 0.001, "a:1").verdict == "ok"
    assert clocks.offset(-7.0, 0.001, "a:1").verdict == "warning"
    assert clocks.offset(0.2, 0.4, "a:1").verdict == "ok"  # no more is known over so slow a way


# ---- limits ----


def test_planted_limits_are_found(monkeypatch):
    told = {resource.RLIMIT_NOFILE: (256, 256), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(resource, "getrlimit", told.__getitem__)
    monkeypatch.setattr(limits, "can_lock_memory", lambda: False)
    monkeypatch.setattr(limits, "rdma_devices", lambda: ("mlx5_0",))
    small = SimpleNamespace(f_bavail=64 * 256, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    found = verdicts(limits.findings(DoctorSettings()))
    assert (found["open files"], found["locked memory"], found["/dev/shm"]) == ("failure",) * 3


def test_limits_that_suffice():
    unlimited = resource.RLIM_INFINITY
    assert limits.open_files(1024, 1 << 20).verdict == "ok"
    assert limits.open_files(1024, 1024).verdict == "warning"
    assert limits.locked_memory(65536, True, ("mlx5_0",)).verdict == "ok"
    assert limits.locked_memory(unlimited, False, ("mlx5_0",)).verdict == "ok"
    assert limits.locked_memory(65536, False, ()).verdict == "ok"
    assert limits.shared_memory(GIB).verdict == "ok"
    assert limits.shared_memory(None).verdict == "failure"


def test_a_container_s_limits(monkeypatch):
    monkeypatch.setattr(resources, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(resources, "memory_bytes", lambda: 2 * GIB)
    found = {finding.check: finding for finding in limits.findings(DoctorSettings())}
    assert found["CPU"].found == f"1.5 of {os.cpu_count()} CPUs may be used."
    assert found["CPU"].verdict == found["memory"].verdict == "warning"
    monkeypatch.setattr(resources, "cpu_quota", lambda: None)
    monkeypatch.setattr(resources, "memory_bytes", lambda: 64 * GIB)
    found = {finding.check: finding for finding in limits.findings(DoctorSettings())}
    assert found["CPU"].verdict == found["memory"].verdict == "ok"
    monkeypatch.setattr(resources, "throttled_share", lambda: 0.4)
    found = {finding.check: finding for finding in limits.findings(DoctorSettings())}
    assert "40% of all periods were cut short" in found["CPU"].found


@pytest.mark.parametrize(
    ("settings", "num_cpus"),
    [
        (DoctorSettings(), 2),
        (DoctorSettings(workers=4), 4),
        (DoctorSettings(cpu_threads=3, tensor_parallel_size=2), 6),
        (DoctorSettings(tensor_parallel_size=8, nnodes=2), 4),
    ],
)
def test_fewer_cpus_than_a_role_wants(settings, num_cpus):
    wanted = limits.wish(settings)
    assert limits.cpus(num_cpus, 0.0, wanted).verdict == "ok"
    found = limits.cpus(num_cpus - 0.5, 0.0, wanted)
    assert found.verdict == "warning"
    assert found.do.startswith(f"Give it {num_cpus} or more: ")


# ---- ports and files ----


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = HostPort("127.0.0.1", taken.getsockname()[1])
        assert files.port(address).verdict == "failure"
    assert files.port(address).verdict == "ok"


@pytest.mark.parametrize(("mode", "verdict"), [(0o600, "ok"), (0o640, "warning"), (0o644, "failure")])
def test_who_may_read_a_secret(tmp_path, mode, verdict):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(mode)
    assert files.secret("--cluster-secret-file", path, is_cluster_secret=True).verdict == verdict


def test_a_secret_that_is_short_or_not_there(tmp_path):
    path = tmp_path / "secret"
    assert files.secret("--api-key-file", path, is_cluster_secret=False).verdict == "failure"
    path.touch(0o600)
    assert files.secret("--api-key-file", path, is_cluster_secret=False).verdict == "failure"
    path.write_text("short")
    assert files.secret("--api-key-file", path, is_cluster_secret=False).verdict == "ok"
    assert files.secret("--cluster-secret-file", path, is_cluster_secret=True).verdict == "failure"


def test_dates_of_certificates(certificate, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SOON", timedelta(hours=6))
    path = certificate.certfile
    [validity] = validities(path.read_text())
    told = subprocess.run(
        ["openssl", "x509", "-noout", "-startdate", "-enddate", "-in", path], capture_output=True, text=True, check=True
    ).stdout
    for line, moment in zip(told.splitlines(), validity, strict=True):
        assert datetime.strptime(line.partition("=")[2], "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC) == moment

    def verdict(now: datetime) -> str:
        return files.certificate("--ssl-certfile", path, now).verdict

    assert verdict(validity.begin - timedelta(seconds=1)) == "failure"
    assert verdict(validity.end) == "failure"
    assert verdict(validity.end - timedelta(hours=1)) == "warning"
    assert verdict(validity.end - timedelta(hours=7)) == "ok"
    (tmp_path / "cut").write_text(path.read_text()[:200])
    (tmp_path / "empty").touch()
    for name in ("cut", "empty", "none"):
        assert files.certificate("--ssl-certfile", tmp_path / name, validity.begin).verdict == "failure"


def test_a_checkpoint(tmp_path):
    assert files.model("baton-tiny").verdict == "ok"
    assert files.model(str(tmp_path)).verdict == "failure"
    assert files.model("org/name").verdict == "skipped"


# ---- the command ----


def test_every_file_that_flags_name_is_looked_at(tmp_path):
    nothing = tmp_path / "nothing"
    named = dict.fromkeys((*SECRETS, *CERTIFICATES), nothing)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = HostPort("127.0.0.1", taken.getsockname()[1])
        found = verdicts(files.findings(DoctorSettings(**named, model=str(nothing), ports=(address,))))
    assert set(found.values()) == {"failure"}
    assert len(found) == len(named) + 2


@pytest.fixture
def planted(monkeypatch) -> list[Finding]:
    findings = [ok("a", "Good.")]
    monkeypatch.setattr(main, "examine", lambda _: findings)
    return findings


def test_the_exit_code_says_whether_a_check_failed(planted, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--no-self-test"])
    assert ended.value.code == 0
    assert "1 ok" in capsys.readouterr().out
    planted.append(failure("b", "Bad.", "Mend it."))
    with pytest.raises(SystemExit) as ended:
        main.main(["--no-self-test", "--json"])
    assert ended.value.code == 1
    stated = json.loads(capsys.readouterr().out)
    assert stated["failed"] is True
    assert stated["findings"][1] == {"check": "b", "verdict": "failure", "found": "Bad.", "do": "Mend it."}


@pytest.mark.parametrize("flag", ["--peer=127.0.0.1:1", "--listen=127.0.0.1:1"])
def test_a_test_with_another_machine_that_cannot_be_made_has_failed(flag, planted, monkeypatch, capsys):
    monkeypatch.setattr(main, "installed_version", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        main.main([flag, "--json"])
    assert ended.value.code == 1
    assert "not tested" in json.loads(capsys.readouterr().out)["findings"][-1]["found"]


def test_a_table_has_what_was_found_and_what_to_do(capsys):
    report.print_table([failure("b", "Bad.", "Mend it.")], Console(width=80))
    out = capsys.readouterr().out
    assert "failure" in out
    assert "-> Mend it." in out


def test_listen_of_a_node_is_a_port_and_not_a_request_to_wait():
    settings = main.of_a_node(DoctorSettings(listen=HostPort("127.0.0.1", 9001)))
    assert (settings.listen, settings.ports) == (None, (HostPort("127.0.0.1", 9001),))


@pytest.mark.parametrize("flags", [("--listen", "127.0.0.1:1", "--peer", "a:2"), ("--no-self-test", "--peer", "a:2")])
def test_settings_that_do_not_go_together(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("baton doctor: --")
