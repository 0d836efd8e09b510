"""Checks of the files that flags name: secrets, certificates, the model; and of ports."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from baton.address import HostPort
from baton.regular_files import read_regular
from baton.rpc.cluster_secret import read_secret
from baton.settings import flag_name
from baton.telemetry.admin import read_key
from deploy.doctor.certificates import validities
from deploy.doctor.finding import Finding, failure, ok, skipped, warning
from deploy.doctor.settings import CERTIFICATES, SECRETS, DoctorSettings
from engine.checkpoint import local_folder, why_no_checkpoint, why_no_tokenizer, why_no_weights
from node.errors import StartupError
from node.preflight import require_free

SOON = timedelta(days=14)


def findings(settings: DoctorSettings) -> Iterator[Finding]:
    for address in settings.ports:
        yield port(address)
    for name in SECRETS:
        if (path := getattr(settings, name)) is not None:
            yield secret(flag_name(name), path, is_cluster_secret=name == "cluster_secret_file")
    for name in CERTIFICATES:
        if (path := getattr(settings, name)) is not None:
            yield certificate(flag_name(name), path, datetime.now(UTC))
    if settings.model is not None:
        yield model(settings.model)


def port(address: HostPort) -> Finding:
    try:
        require_free("--ports", address)
    except StartupError as error:
        do = "Stop what listens there (ss -ltnp), or choose another address of this machine."
        return failure(f"port {address}", f"{str(error).partition(': ')[2]}.", do)
    return ok(f"port {address}", "It is free.")


def secret(flag: str, path: Path, is_cluster_secret: bool) -> Finding:
    try:
        read_secret(path) if is_cluster_secret else read_key(path)
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        return failure(flag, f"{error}.", "Write one with openssl rand -hex 32, readable for baton's user.")
    text = f"{path} has mode {stat.S_IMODE(mode):04o}"
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        return failure(flag, f"{text}: everybody on this machine has access.", f"chmod 600 {path}, and change it.")
    if mode & (stat.S_IRGRP | stat.S_IWGRP):
        return warning(flag, f"{text}: its group has access.", f"chmod 600 {path}, unless the group is baton's own.")
    return ok(flag, f"{text}.")


def certificate(flag: str, path: Path, now: datetime) -> Finding:
    try:
        found = validities(read_regular(path).decode())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        return failure(flag, f"{path}: {error}.", "Give it a PEM file with a certificate.")
    begin, end = max(v.begin for v in found), min(v.end for v in found)
    if now < begin:
        text = f"{path} is not valid before {begin:%Y-%m-%d %H:%M} UTC."
        return failure(flag, text, "Set this machine's clock, or get another certificate.")
    if now >= end:
        return failure(flag, f"{path} expired at {end:%Y-%m-%d %H:%M} UTC.", "Renew it, and restart what reads it.")
    if end - now < SOON:
        return warning(flag, f"{path} expires at {end:%Y-%m-%d %H:%M} UTC.", "Renew it, and restart what reads it.")
    return ok(flag, f"{path} is valid until {end:%Y-%m-%d}.")


def model(name: str) -> Finding:
    """As a node checks it before it loads."""
    folder = local_folder(name)
    if folder is None:
        return skipped("model", f"{name} is the id of a model on the hub, which is looked at after its download.")
    if problem := why_no_checkpoint(folder) or why_no_tokenizer(folder) or why_no_weights(folder):
        return failure("model", f"{folder}: {problem}.", "Give --model the folder of a whole checkpoint.")
    if unreadable := [file.name for file in sorted(folder.iterdir()) if not os.access(file, os.R_OK)]:
        text = f"{folder}: {', '.join(unreadable[:3])} cannot be read by user {os.getuid()}."
        return failure("model", text, "Make the files readable for baton's user.")
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return ok("model", f"{folder} is a checkpoint with {num_bytes / 1e9:.2f} GB of weights.")
