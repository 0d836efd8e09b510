"""Puts docs/api.md together."""

from __future__ import annotations

from router.http.openapi import describe
from tools.api_reference import grpc, http
from tools.api_reference.covered import ROOT, Covered

PATH = ROOT / "docs" / "api.md"

_HEAD = """\
# API

Written by `python -m tools.api_reference` from the code that serves it: change that, not this page. The column *test*
names one test, below `tests/`, that covers the line. `tests/router/http/test_ranges.py` tests every range and type.

A field that is null is the same as one that is not there. *unset* says what applies then; *the model's* is what its
`generation_config.json` says. A value outside its range is a 400 that names field, value and range. [Structured
outputs](structured_outputs.md), [tool calls and reasoning](tools.md) and [responses](responses.md) have pages of their
own. Chats and responses are also served over [WebSockets](responses.md#websockets).
"""
_BODIES = """\
## Fields over HTTP

"""
_REFUSED = """\
## Refused fields

Fields of other servers and APIs that would change an answer in a way that is not served here are a 400 that names them,
unless the endpoint's table above has them. `tests/router/http/test_unsupported.py` tests them all.

"""
_NO_EFFECT = """\
## Accepted, without an effect

These change no answer. The log names every other unknown field once, with a warning.

"""
_GRPC = """\
## gRPC

The service `baton.v1.Generation`. Ranges are those of HTTP. A field without a name *over HTTP* has none there. If a
field causes an error, the trailing metadata has its name as `error-param`. If the request may be tried again, they have
`retry-after`, in seconds. Beside it are server reflection and the health service, `grpc.health.v1.Health`: the names ""
and `baton.v1.Generation` are serving as long as `/ready` says 200, and `baton.v1.Cluster` unless it says *degraded*.

"""


def render(covered: Covered) -> str:
    document = describe()
    bodies = list(http.bodies(document, covered))
    names = {name for schema in document["components"]["schemas"].values() for name in schema.get("properties", {})}
    sections = [
        _HEAD,
        f"## Endpoints\n\n{http.endpoints(document, covered)}",
        _BODIES + "\n".join(bodies),
        _REFUSED + "\n".join(http.refused()),
        _NO_EFFECT + http.without_effect(),
        _GRPC + grpc.methods(),
        "\n".join(grpc.messages(names, covered)),
    ]
    return "\n".join(sections)
