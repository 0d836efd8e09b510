"""HOST:PORT at its edges."""

from __future__ import annotations

import pytest

from baton.address import HostPort


@pytest.mark.parametrize("port", [1, 65535])
def test_ports_that_there_are(port: int) -> None:
    assert HostPort.parse(f"host:{port}") == HostPort("host", port)


@pytest.mark.parametrize("port", ["65536", "-1", "x", "", "1.5", "٣"])
def test_ports_that_there_are_not(port: str) -> None:
    with pytest.raises(ValueError, match="port"):
        HostPort.parse(f"host:{port}")


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, ".".join(4 * ["a" * 63])])
def test_names_that_no_host_can_have(host: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a host"):
        HostPort.parse(f"{host}:1")


@pytest.mark.parametrize("host", ["a b", "a\0", "a\n", "a\x7f", "a\u2028b", "a/b", "[a", ""])
def test_what_is_no_host_and_port(host: str) -> None:
    """A resolver takes what is before a NUL, and logs have a line for each address."""
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        HostPort.parse(f"{host}:1")


@pytest.mark.parametrize(
    "host", ["a" * 63 + ".b", ".".join([*3 * ["a" * 63], "a" * 61, ""]), "a.", "bücher.example", "_a.b", "10.0.0.1"]
)
def test_names_that_a_host_can_have(host: str) -> None:
    assert HostPort.parse(f"{host}:1").host == host


def test_an_address_with_a_scope() -> None:
    assert HostPort.parse("[fe80::1%eth0]:1").host == "fe80::1%eth0"


def test_port_0_is_for_listening_alone() -> None:
    assert HostPort.parse("host:0", allow_port_0=True).port == 0
    with pytest.raises(ValueError, match="port 0"):
        HostPort.parse("host:0")


@pytest.mark.parametrize(
    ("host", "it_is"),
    [("0.0.0.0", True), ("::", True), ("0::0", True), ("127.0.0.1", False), ("::1", False), ("localhost", False)],
)
def test_the_wildcard_is_known_in_any_form(host: str, it_is: bool) -> None:
    assert HostPort(host, 1).is_wildcard is it_is
