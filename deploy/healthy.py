"""A container's health check: exits with 0 if the URL answers 200 within three seconds, else with 1 and the reason.

`python -m deploy.healthy http://127.0.0.1:8000/health`; imports nothing but the standard library.
"""

from __future__ import annotations

import sys
import urllib.request

TIMEOUT_S = 3.0


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m deploy.healthy URL", file=sys.stderr)
        return 2
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy of the environment
    try:
        direct.open(sys.argv[1], timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:  # OSError: also statuses of 400 and more
        print(f"{sys.argv[1]}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
