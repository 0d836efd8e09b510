"""Pods of the rendered chart as processes, each in a network namespace of its own: a switch, addresses, names, and the
chart's NetworkPolicies as packet filters. Needs root, iproute2 and nftables."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Object = dict[str, Any]
T = TypeVar("T")

SUBNET = "10.77.0"
STOP_S = 30.0
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_START = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def why_not(kind: str = "--net", *tools: str) -> str:
    """Why there can be no namespaces of that kind on this machine; nothing if there can. tools: what they need; none
    named: what a Network needs."""
    lacking = [tool for tool in tools or ("ip", "nft", "unshare", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() or lacking:
        return f"lacks {', '.join(lacking)}" if lacking else "is not root"
    made = subprocess.run(["unshare", kind, "--fork", "true"], check=False, capture_output=True, text=True)
    return made.stderr.strip()


@dataclass(eq=False)
class Host:
    """A pod, or what stands for one: in a namespace of the cluster, with labels."""

    name: str
    address: str
    netns: str
    namespace: str
    labels: Mapping[str, str]
    hosts_file: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def within(self, call: Callable[[], T]) -> T:
        """The result of a call whose sockets are this host's, or what it raises."""
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                with Path(f"/run/netns/{self.netns}").open() as place:
                    if _LIBC.setns(place.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(call())
            except Exception as error:  # noqa: BLE001 - raised on the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """A process with mounts, a host name and shared memory of its own, which ends with this one."""
        inside = ["nsenter", f"--net=/run/netns/{self.netns}", "unshare", "--mount", "--uts", "--ipc"]
        argv = [*inside, "setpriv", "--pdeathsig", "KILL", "sh", "-c", _START, "sh", self.name]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, str(self.hosts_file), *command], stdout=log, stderr=log, env={**os.environ, **env}
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """End its process, if it has one; the exit code."""
        if self.process is None:
            return None
        self.signal(number)
        try:
            return self.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait(STOP_S)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Raises TimeoutExpired."""
        assert self.process is not None
        return self.process.wait(timeout_s)


@dataclass
class Network:
    """Hosts on one switch. `close` ends their processes and removes their namespaces."""

    folder: Path
    hosts: list[Host] = field(default_factory=list)
    _switch: str = f"baton{os.getpid()}"

    def __enter__(self) -> Network:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            host.stop(signal.SIGKILL)
        for name in [*(host.netns for host in self.hosts), self._switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)

    def add(self, name: str, namespace: str, labels: Mapping[str, str]) -> Host:
        """A host that every other can reach, as long as no rules are set."""
        number = len(self.hosts) + 1
        hosts_file = self.folder / f"{name}.hosts"
        hosts_file.write_text("127.0.0.1 localhost\n")
        host = Host(
            name, f"{SUBNET}.{number}", f"{self._switch}-{number}", namespace, labels, hosts_file,
            self.folder / f"{name}.log",
        )  # fmt: skip
        _run("ip", "netns", "add", host.netns)
        self.hosts.append(host)
        port = f"port{number}"
        _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.netns)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
        _run("ip", "-n", host.netns, "address", "add", f"{host.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", host.netns, "link", "set", link, "up")
        return host

    def resolve(self, names: Mapping[str, Iterable[Host]]) -> None:
        """What names mean from now on, on all hosts."""
        lines = ["127.0.0.1 localhost", *(f"{host.address} {name}" for name, found in names.items() for host in found)]
        for host in self.hosts:
            host.hosts_file.write_text("\n".join(lines) + "\n")  # the same file, which is mounted

    def enforce(self, policies: Iterable[Object], ports: Mapping[str, Mapping[str, int]]) -> None:
        """Let each host that a NetworkPolicy selects be reached, and reach others, as that allows. ports: the numbers
        of named ports, by component."""
        for policy in policies:
            spec = policy["spec"]
            for host in [host for host in self.hosts if _selected(host, spec["podSelector"])]:
                named = ports[host.labels["app.kubernetes.io/component"]]
                rules = [
                    "table inet pod {",
                    *self._chain("input", "saddr", spec["ingress"], "from", named),
                    *self._chain("output", "daddr", spec["egress"], "to", named),
                    "}",
                ]
                text = "flush ruleset\n" + "\n".join(rules) + "\n"
                nft = ["nsenter", f"--net=/run/netns/{host.netns}", "nft", "-f", "-"]
                subprocess.run(nft, input=text, text=True, check=True, capture_output=True)

    def _chain(
        self, hook: str, end: str, allowed: Sequence[Object], peers: str, named: Mapping[str, int]
    ) -> Iterable[str]:
        yield f"chain {hook} {{ type filter hook {hook} priority 0; policy drop;"
        yield "ct state established,related accept"
        yield f"{'iif' if hook == 'input' else 'oif'} lo accept"
        for rule in allowed:
            addresses = [h.address for h in self.hosts if any(_is_peer(h, peer) for peer in rule.get(peers, ()))]
            if peers in rule and not addresses:
                continue
            who = f"ip {end} {{ {', '.join(addresses)} }} " if peers in rule else ""
            for port in rule.get("ports", [None]):
                yield who + (_port(port, named) if port else "") + "accept"
        yield "}"


def arguments(
    container: Object, host: Host, variables: Mapping[str, str] | None = None, files: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """The command of a pod's container, and its environment, as Kubernetes and the image's entry point make it.
    variables: those that another controller adds. files: what has the secrets that are mounted below /etc/baton."""
    fields = {"metadata.name": host.name, "status.podIP": host.address}
    env = {
        entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container.get("env", ())
    } | dict(variables or {})
    filled = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text) for text in container["args"]]
    if files is not None:
        filled = [text.replace("=/etc/baton/", f"={files}/etc/baton/") for text in filled]
    entry = ["router"] if container["name"] == "router" else []
    return [sys.executable, "-m", "deploy.command", *entry, *filled], env


def _selected(host: Host, selector: Object) -> bool:
    wanted = selector.get("matchLabels", {})
    return bool(host.labels) and wanted.items() <= host.labels.items()


def _is_peer(host: Host, peer: Object) -> bool:
    if "namespaceSelector" in peer:
        return bool(host.namespace == peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])
    return _selected(host, peer["podSelector"])


def _port(port: Object, named: Mapping[str, int]) -> str:
    number = port["port"] if isinstance(port["port"], int) else named[port["port"]]
    return f"{port.get('protocol', 'TCP').lower()} dport {number} "


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
