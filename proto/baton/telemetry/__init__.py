"""What a process tells of itself: log lines (`logs`), metrics (`metrics`), and the page that shows them (`http`)."""

from baton.telemetry.http import MetricsServer
from baton.telemetry.logs import configure_logging, request_scope
from baton.telemetry.metrics import NodeMetrics, RouterMetrics, new_registry

__all__ = ["configure_logging", "request_scope", "new_registry", "RouterMetrics", "NodeMetrics", "MetricsServer"]
