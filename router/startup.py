"""What a router starts with, made from its settings: limits, keys and certificates of its outer edge, parsers, the
policy, and the sources of nodes."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass

import grpc

from baton.node_info import NodeRole
from baton.process.open_files import max_open_files, why_too_few
from baton.process.threads import why_too_few_threads
from baton.telemetry.otlp import NoOpenTelemetry, SpanSender
from router.api_keys import ApiKeys, UnusableKeys
from router.discovery.dns import DnsName
from router.discovery.membership import Membership
from router.discovery.nodes_file import BadNodesFile, NodesFile
from router.discovery.source import Member, Source
from router.http.app import Access
from router.http.console.page import paths as console_paths
from router.http.limits import ConnectionLimits
from router.plugins import UnknownPlugin
from router.policies import Policy, find_policy
from router.reasoning_parsers import ReasoningParser, find_reasoning_parser
from router.settings import RouterSettings
from router.text.answer_reader import Parsers
from router.tls import TlsError, TlsFiles
from router.tool_parsers import ToolParser, find_tool_parser

log = logging.getLogger(__name__)

_OWN_FILES = 256
"""File descriptors for other purposes: nodes, logs, ports, clients that are refused for lack of room."""
_MANY_CONNECTIONS = 16_384
_NUM_PORTS = 2


class StartError(Exception):
    """The router cannot start; the text is one line that names the flag."""


@dataclass(frozen=True, slots=True)
class Edge:
    """`tls` is for HTTP, `credentials` is the same for gRPC; None: no TLS."""

    limits: ConnectionLimits
    access: Access
    tls: ssl.SSLContext | None
    credentials: grpc.ServerCredentials | None

    @property
    def keys(self) -> ApiKeys | None:
        return self.access.keys


def make_edge(settings: RouterSettings) -> Edge:
    """Reads the files that the settings name. Raises StartError."""
    if too_few := why_too_few_threads():
        raise StartError(too_few)
    try:
        keys = _keys(settings)
    except UnusableKeys as error:
        raise StartError(f"--api-key-file: {error}") from None
    access = Access(
        keys=keys,
        protect_metrics=settings.protect_metrics,
        origins=settings.allowed_origins,
        methods=settings.allowed_methods,
        headers=settings.allowed_headers,
        credentials=settings.allow_credentials,
        open_paths=console_paths() if settings.console else frozenset(),
    )
    try:
        files = _tls_files(settings)
        tls, credentials = (files.context(), files.credentials()) if files else (None, None)
    except TlsError as error:
        raise StartError(str(error)) from None
    return Edge(_limits(settings), access, tls, credentials)


def make_parsers(settings: RouterSettings) -> Parsers:
    """Loads the parsers that the settings name. Raises StartError."""
    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    flag = "--tool-call-parser"
    try:
        if settings.tool_call_parser is not None:
            tool = find_tool_parser(settings.tool_call_parser)
        flag = "--reasoning-parser"
        if settings.reasoning_parser is not None:
            reasoning = find_reasoning_parser(settings.reasoning_parser)
    except UnknownPlugin as error:
        raise StartError(f"{flag}: {error}") from None
    return Parsers(tool, reasoning, settings.enable_auto_tool_choice, settings.exclude_tools_when_tool_choice_none)


def make_policy(settings: RouterSettings) -> Policy:
    """Loads the policy that the settings name. Raises StartError."""
    try:
        return find_policy(settings.policy)
    except UnknownPlugin as error:
        raise StartError(f"--policy: {error}") from None


def make_span_sender(settings: RouterSettings) -> SpanSender | None:
    """None: no traces are sent. Raises StartError."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        return SpanSender(settings.otlp_traces_endpoint, settings.node_id or f"router-{settings.http.port}")
    except NoOpenTelemetry as error:
        raise StartError(f"--otlp-traces-endpoint: {error}") from None


def make_membership(settings: RouterSettings) -> Membership:
    """All sources of nodes that the settings name. Raises StartError."""
    fixed = [Member(NodeRole.PREFILL, address) for address in settings.prefill]
    fixed += [Member(NodeRole.DECODE, address) for address in settings.decode]
    names = [(NodeRole.PREFILL, name) for name in settings.prefill_dns]
    names += [(NodeRole.DECODE, name) for name in settings.decode_dns]
    sources: list[Source] = [DnsName(role, name, settings.dns_interval) for role, name in names]
    if settings.nodes_file is not None:
        try:
            sources.append(NodesFile(settings.nodes_file))
        except BadNodesFile as error:
            raise StartError(str(error)) from None
    return Membership(fixed, sources)


def make_admin_keys(settings: RouterSettings) -> ApiKeys | None:
    """None: there is no admin API. Raises StartError."""
    if not settings.has_admin_keys:
        return None
    try:
        return ApiKeys([key.get_secret_value() for key in settings.admin_api_key], settings.admin_api_key_file)
    except UnusableKeys as error:
        raise StartError(f"--admin-api-key-file: {error}") from None


def _keys(settings: RouterSettings) -> ApiKeys | None:
    if not settings.has_api_keys:
        return None
    given = [key.get_secret_value() for key in settings.api_key]
    return ApiKeys(given, settings.api_key_file, settings.cache_salt_per_key)


def _tls_files(settings: RouterSettings) -> TlsFiles | None:
    if settings.ssl_certfile is None:
        return None
    return TlsFiles(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs, settings.ssl_cert_reqs)


def _limits(settings: RouterSettings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=_max_connections(settings, max_open_files()),
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout,
        body_timeout_s=settings.body_timeout,
        write_timeout_s=settings.write_timeout,
        idle_timeout_s=settings.idle_timeout,
    )


def _max_connections(settings: RouterSettings, open_files: int) -> int:
    """Connections to each port. Logs once if the limit of open files does not allow what was asked for. Raises
    StartError."""
    if too_few := why_too_few(open_files):
        raise StartError(too_few)
    room = max(1, (open_files - _OWN_FILES) // _NUM_PORTS)
    wanted = settings.max_connections or settings.max_num_requests
    if room < wanted:
        flag = "--max-connections" if settings.max_connections else "--max-num-requests"
        log.warning("open files: a limit of %d allows %d connections, %s wants %d", open_files, room, flag, wanted)
    return min(room, settings.max_connections or _MANY_CONNECTIONS)
