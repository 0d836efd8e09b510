"""The address of a server, as flags have it."""

from __future__ import annotations

from urllib.parse import urlsplit


def check_server_url(url: str) -> str:
    """The URL without a slash at its end. Raises ValueError unless it is http:// or https:// with a host. A user and a
    password in it would be sent by nobody, but written into reports."""
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT without '@': a key goes into --api-key")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
        (parts.hostname or "").encode("idna")  # a name that cannot be looked up, such as a..b
    except ValueError:
        good = False
    if not good or not url.isascii() or any(character.isspace() for character in url):
        raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
    return url.rstrip("/")
