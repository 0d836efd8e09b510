"""A process's telemetry: log lines (`logs`), metrics (`metrics`) and the pages that serve them (`http`)."""

from baton.telemetry.admin import AdminGate
from baton.telemetry.experts import ExpertReadings
from baton.telemetry.exposition import metrics_page
from baton.telemetry.http import MetricsServer, Page
from baton.telemetry.logs import configure_logging, rename_request, request_scope
from baton.telemetry.metrics import ROUTER, NodeMetrics, RouterMetrics, new_registry

__all__ = [
    "configure_logging",
    "request_scope",
    "rename_request",
    "new_registry",
    "ROUTER",
    "RouterMetrics",
    "NodeMetrics",
    "metrics_page",
    "MetricsServer",
    "Page",
    "AdminGate",
    "ExpertReadings",
]
