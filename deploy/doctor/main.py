"""`baton doctor`: check the machine, test the transfer path, report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from baton.address import HostPort
from baton.rpc.cluster_secret import read_secret
from baton.settings import EXIT_USAGE, parse
from deploy.doctor import clocks, files, gpus, limits, report, transports, versions
from deploy.doctor.finding import Finding, failure, has_failed, skipped
from deploy.doctor.settings import DoctorSettings
from deploy.doctor.transfer.control import TestFailed
from deploy.doctor.transfer.listen import Host, Listener
from deploy.doctor.transfer.peer import Test, within_machine
from deploy.doctor.transfer.peer import findings as peer_findings
from deploy.doctor.versions import installed_version

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Print findings, and exit with 1 if a check failed."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    settings = parse(DoctorSettings, arguments)
    if not any(word.partition("=")[0] == "--listen" for word in arguments):
        settings = of_a_node(settings)
    if problem := settings.problem():
        sys.stderr.write(f"{settings.prog}: {problem}\n")
        sys.exit(EXIT_USAGE)
    console = Console(stderr=settings.json_output)
    with console.status("checking this machine"):
        findings = [*examine(settings)]
    if settings.self_test and installed_version("torch") is not None:
        with console.status(_title(settings)):
            findings += self_test(settings)
    elif settings.peer or settings.listen:
        text = "There is no torch here, so the way to the other machine was not tested."
        findings.append(failure("peer", text, "Run it where nodes run, with what they need."))
    if settings.json_output:
        print(report.as_json(findings))
    else:
        report.print_table(findings, console)
    sys.exit(EXIT_FAILED if has_failed(findings) else 0)


def of_a_node(settings: DoctorSettings) -> DoctorSettings:
    """--listen from the environment or the file is a node's: one more address to be free."""
    if settings.listen is None:
        return settings
    return settings.model_copy(update={"listen": None, "ports": (*settings.ports, settings.listen)})


def examine(settings: DoctorSettings) -> Iterator[Finding]:
    """The checks of this machine."""
    yield from versions.findings()
    yield from gpus.findings(settings.device)
    yield from transports.findings(settings.transport, settings.device, settings.transfer_interface)
    yield from clocks.findings()
    yield from limits.findings(settings)
    yield from files.findings(settings)


def _title(settings: DoctorSettings) -> str:
    if settings.listen:
        return f"waiting at {settings.listen} for baton doctor --peer"
    return f"moving KV blocks to {settings.peer or 'another process'}"


def self_test(settings: DoctorSettings) -> list[Finding]:
    """The test of the transfer path, as the three modes of the command have it."""
    try:
        secret = read_secret(settings.cluster_secret_file) if settings.cluster_secret_file else None
    except ValueError:
        return [skipped("transfer", "The cluster secret cannot be read, so there is no test of the transfer path.")]
    host = Host(settings.device, settings.transfer_interface, secret, settings.peer_timeout)
    test = Test(settings.transport, settings.self_test_mib, host)
    if settings.listen is not None:
        return wait_for_peer(settings.listen, host)
    return [*(within_machine(test) if settings.peer is None else peer_findings(settings.peer, test))]


def wait_for_peer(address: HostPort, host: Host) -> list[Finding]:
    """Answer a peer, and return what it found."""
    try:
        listener = Listener(address, host)
    except OSError as error:
        return [failure("peer", f"{address}: {error.strerror}.", "Choose a free port and an address of this machine.")]
    try:
        return listener.serve()
    except TestFailed as error:
        return [failure("peer", f"{error}.", f"Start baton doctor --peer {address} there, and open the port.")]
    finally:
        listener.close()


if __name__ == "__main__":
    main()
