"""Compares what was measured with what the way between the two ends should carry."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.doctor.finding import Finding, ok, warning

FAR_BELOW = 0.25
"""Of what the link should do: contention explains a half, not a quarter."""
TCP_ENOUGH_GB_S = 3.0
"""Python's few plain streams do not fill a faster interface."""
HOST_COPIES = 3
"""Between CPUs of one host KV is copied into a slot, to the peer's, and out of it."""


@dataclass(frozen=True, slots=True)
class Way:
    """What leads to the peer; GB/s, None: not known. tcp: measured with plain streams. nic, rdma: as stated."""

    same_host: bool
    on_gpu: bool
    transport: str
    tcp_gb_s: float
    copy_gb_s: float
    nic_gb_s: float | None = None
    rdma_gb_s: float | None = None

    def ceiling(self) -> tuple[float, str]:
        """What KV should travel at, and by which measure."""
        if self.same_host and self.on_gpu:
            return self.copy_gb_s, "one copy between the GPUs"
        if self.same_host and self.transport in ("ipc", "memory"):
            return self.copy_gb_s / HOST_COPIES, f"{HOST_COPIES} copies within memory"
        if not self.same_host and self.rdma_gb_s is not None:
            return self.rdma_gb_s, "the RDMA port"
        return self.tcp_gb_s, "plain TCP streams"


def sockets(way: Way) -> Finding:
    """Plain TCP beside what the interface states."""
    check, nic = "plain TCP", way.nic_gb_s
    if nic is None:
        return ok(check, f"Plain TCP streams carry {way.tcp_gb_s:.2f} GB/s; no interface states its speed.")
    text = f"Plain TCP streams carry {way.tcp_gb_s:.2f} GB/s over an interface of {nic:.2f}."
    if way.tcp_gb_s >= FAR_BELOW * min(nic, TCP_ENOUGH_GB_S):
        return ok(check, text)
    do = "Something between the two is slower: a switch port, an overlay network, the MTU, a proxy; try iperf3."
    return warning(check, text, do)


def transfer(way: Way, gb_s: float, num_bytes: int) -> Finding:
    ceiling, measure = way.ceiling()
    text = (
        f"{way.transport} moves KV blocks at {gb_s:.2f} GB/s ({num_bytes >> 20} MiB each time, every block compared), "
        f"beside {ceiling:.2f} of {measure}."
    )
    if gb_s >= FAR_BELOW * ceiling:
        return ok("transfer", text)
    return warning("transfer", text, _advice(way))


def _advice(way: Way) -> str:
    if way.same_host and way.transport != "ipc":
        return "Use --transport ipc within a host, or look in the log for the path that UCX takes."
    if way.same_host:
        return "Look at what else runs on this machine."
    if way.rdma_gb_s is not None:
        return "It does not use RDMA: try --transport nixl, --transfer-interface, and the check named RDMA."
    return "Look at what else runs on these machines, and at --transfer-interface."
