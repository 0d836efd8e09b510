"""A container's health check: exits with 0 if the URL answers 200 within three seconds, else with 1 and the reason.

`python -m deploy.healthy http://127.0.0.1:8000/health`; imports nothing but the standard library. A server that hangs
up on plain HTTP is asked through TLS: an image's check is the same whatever flags its router has. Whose certificate
that is does not matter here, as it does not to Kubernetes' probes.
"""

from __future__ import annotations

import http.client
import ssl
import sys
import urllib.request

TIMEOUT_S = 3.0


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m deploy.healthy URL", file=sys.stderr)
        return 2
    url = sys.argv[1]
    try:
        try:
            _ask(url)
        except (ConnectionResetError, http.client.BadStatusLine):
            _ask(url.replace("http://", "https://", 1))
    except (OSError, ValueError) as error:  # OSError: also statuses of 400 and more
        print(f"{url}: {error}")
        return 1
    return 0


def _ask(url: str) -> None:
    direct = urllib.request.ProxyHandler({})  # never through a proxy of the environment
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=unverified))
    opener.open(url, timeout=TIMEOUT_S).close()


if __name__ == "__main__":
    sys.exit(main())
