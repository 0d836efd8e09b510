"""Settings of every command: one name is the flag, the environment variable and the YAML key.

    --max-num-seqs 8        BATON_MAX_NUM_SEQS=8        max-num-seqs: 8   (in the file of --config)

A flag wins over the environment, the environment over the file, the file over the default. A command's settings are a
subclass of `Settings`, where each field has a description with its unit; `parse` creates an instance, or exits with one
line that names the flag.

Environment and file may serve several commands, each of which ignores the others' names. A variable that belongs to no
command causes a warning, such a key in the file an error; both suggest the closest name (`baton.setting_names`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict
from yaml.constructor import ConstructorError

import baton
from baton.address import HostPort
from baton.log_levels import LogLevels, parse_log_levels
from baton.process.standard_files import open_standard_files
from baton.setting_names import ALL_NAMES, closest, of_kubernetes
from baton.unique_keys import UniqueKeys
from baton.vllm_flags import VLLM_FLAGS

ENV_PREFIX = "BATON_"
EXIT_USAGE = 2


def _connect_address(value: object) -> object:
    return value if isinstance(value, HostPort) else HostPort.parse(str(value))


def _listen_address(value: object) -> object:
    return value if isinstance(value, HostPort) else HostPort.parse(str(value), allow_port_0=True)


def _address_list(value: object) -> object:
    """Parse `a:1,b:2`, or a list of such texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        return value
    return tuple(HostPort.parse(part) for text in texts for part in str(text).split(",") if part.strip())


def _size_list(value: object) -> object:
    """Parse `1,2,4`, or a list of such texts or of numbers."""
    parts = value if isinstance(value, list | tuple) else [value]
    split = [part.split(",") if isinstance(part, str) else [part] for part in parts]
    return tuple(size for sizes in split for size in sizes if size != "")


def _names(value: object) -> object:
    """Parse `a,b`, or `["a", "b"]` as in vLLM, or a list of such texts."""
    if isinstance(value, str) and value.startswith("["):
        value = json.loads(value)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        return () if value is None else value
    if len(texts) == 1 and str(texts[0]).startswith("["):
        return _names(str(texts[0]))
    return tuple(part.strip() for text in texts for part in str(text).split(",") if part.strip())


_UNITS = {name: base**power for base, names in ((1000, "kmgt"), (1024, "KMGT")) for power, name in enumerate(names, 1)}


def _large_number(value: object) -> object:
    """Parse `25.6k`, with k, m, g or t for powers of 1000, and `16K`, with K, M, G or T for powers of 1024."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(\.[0-9]{1,9})?)([kmgtKMGT])\s*", value) if isinstance(value, str) else None
    if found is None:
        return value
    number, fraction, unit = found.groups()
    if fraction and unit.isupper():
        raise ValueError(f"{unit} is a power of 1024 and takes no fraction, {unit.lower()} is one of 1000 and does")
    return int(Decimal(number) * _UNITS[unit])


def _json_object(value: object) -> object:
    """Parse an object; one in a file may be there as it is."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


def _log_levels(text: str) -> str:
    parse_log_levels(text)
    return text


ConnectAddress = Annotated[HostPort, BeforeValidator(_connect_address)]
ListenAddress = Annotated[HostPort, BeforeValidator(_listen_address)]
"""Port 0 selects any free port."""
ConnectAddresses = Annotated[tuple[HostPort, ...], BeforeValidator(_address_list)]
Sizes = Annotated[tuple[PositiveInt, ...], BeforeValidator(_size_list)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
LargeNumber = Annotated[int | None, BeforeValidator(_large_number)]
"""May be written as `16K` where vLLM takes that."""

JsonObject = Annotated[dict[str, Any], BeforeValidator(_json_object)]

LONGEST_S = 365 * 86_400.0
"""The longest time limit: threads cannot wait for an infinite one, nor can anything be filed by when it ends."""

LogFormat = Literal["text", "json"]


class Settings(BaseSettings):
    """The settings of every command. Frozen: values derived from settings live elsewhere."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, enable_decoding=False
    )

    prog: ClassVar[str] = "baton"

    config: Path | None = Field(
        None, description="YAML file, keys named like the flags; it may serve several commands, each takes its own"
    )
    log_level: Annotated[str, AfterValidator(_log_levels)] = Field(
        "info",
        description="least severe log lines to write: debug, info, warning or error; of some modules others, as in "
        "info,router.http=debug",
    )
    log_format: LogFormat = Field("text", description="form of log lines: text, or json, an object each")

    def log_levels(self) -> LogLevels:
        return parse_log_levels(self.log_level)


S = TypeVar("S", bound=Settings)


class SettingsError(Exception):
    """A setting that cannot be used; the text is one line that names the flag."""


def parse(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Settings from `argv` (default: the process's), the environment and the file.

    On an error, writes one line to stderr and exits with code 2; `--help` and `--version` exit with 0.
    """
    open_standard_files()
    parser = _Parser(prog=cls.prog, usage="%(prog)s [--flag value ...]", description=cls.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {baton.__version__}")
    for name, field in cls.model_fields.items():
        _add_flag(parser, name, field)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(cls, unknown[0])}")
    flags = vars(found)
    for line in misspelt_variables(cls, os.environ):
        sys.stderr.write(f"{cls.prog}: warning: {line}\n")
    try:
        return load(cls, flags)
    except SettingsError as error:
        parser.error(str(error))


def load(cls: type[S], flags: Mapping[str, Any]) -> S:
    """Settings from `flags` (by field name), the environment and the file. Raises SettingsError."""
    variables = {name.upper(): value for name, value in os.environ.items() if value}  # read in lower case too
    path = flags.get("config") or variables.get(env_name("config"))
    in_file = _read_file(cls, Path(path)) if path else {}
    from_file = {name: value for name, value in in_file.items() if env_name(name) not in variables}
    try:
        return cls(**{**from_file, **flags})  # pydantic-settings adds the environment below these
    except ValidationError as error:
        raise SettingsError(_describe(error, flags, from_file, path)) from None


def _hint(cls: type[Settings], argument: str) -> str:
    """What the first argument that no flag takes may have been meant for."""
    if not argument.startswith("--"):
        return ""
    name = argument[2:].split("=")[0].replace("-", "_")
    if name in ALL_NAMES:
        return ", which other commands take"
    if name in VLLM_FLAGS:
        return f"; {VLLM_FLAGS[name]}"
    meant = closest(name, cls.model_fields)
    return f", did you mean {flag_name(meant)}?" if meant else ""


def misspelt_variables(cls: type[Settings], environ: Mapping[str, str]) -> list[str]:
    """A line for each variable with our prefix that is not a setting of any command."""
    known = ALL_NAMES | cls.model_fields.keys()
    lines = []
    ours = {variable for variable in environ if variable.upper().startswith(ENV_PREFIX)}
    for variable in sorted(ours - of_kubernetes(environ)):
        name = variable[len(ENV_PREFIX) :].lower()
        if name in known:
            continue
        meant = closest(name, known)
        lines.append(f"{variable} is no setting" + (f", did you mean {env_name(meant)}?" if meant else ""))
    return lines


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def env_name(field: str) -> str:
    return ENV_PREFIX + field.upper()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n")
        raise SystemExit(EXIT_USAGE)


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """Values remain text here: pydantic converts and validates them, whatever their source."""
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text(field).replace("%", "%%")}
    if bool in (field.annotation, *get_args(field.annotation)):
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = metavar(field.annotation).removesuffix(",...")
        if get_origin(field.annotation) is tuple:
            options |= {"action": "extend", "nargs": "+"}  # `--flag 1,2`, `--flag 1 2` as in vLLM, or a flag for each
    parser.add_argument(flag_name(name), *_short_flags(field), **options)


def _short_flags(field: FieldInfo) -> list[str]:
    """A shorter flag that cannot be a field's name, as pydantic has a method of that name."""
    extra = field.json_schema_extra
    return [str(extra["flag"])] if isinstance(extra, dict) and "flag" in extra else []


def help_text(field: FieldInfo) -> str:
    """The description, and the default if it says something."""
    text = str(field.description)
    if field.is_required():
        text += " (required)"
    elif field.default not in (None, "", (), {}):
        default = {True: "on", False: "off"}[field.default] if field.annotation is bool else field.default
        default = ",".join(map(str, default)) if isinstance(default, tuple) else default
        text += f" (default: {default})"
    return text


def metavar(annotation: Any) -> str:
    """The placeholder for the value in `--help`: the choices, or the kind of value."""
    kinds = {int: "N", float: "X", Path: "PATH", HostPort: "HOST:PORT", str: "TEXT"}
    if annotation in kinds:
        return kinds[annotation]
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in parts) + "}"
    found = next((name for part in parts if (name := metavar(part)) != "VALUE"), "VALUE")
    return found + ",..." if get_origin(annotation) is tuple else found


_MOST_FILE_BYTES = 1 << 20
"""Of --config. A checkpoint's weights, for one, would be read into memory as a whole."""


class _Values(UniqueKeys, yaml.SafeLoader):
    """Without keys that are there twice, and without zeros in texts, which may be paths."""

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if "\0" in text:
            raise ConstructorError(None, None, "a text has a zero character", node.start_mark)
        return text


def _read_file(cls: type[Settings], path: Path) -> dict[str, Any]:
    """The file's settings by field name, without those of other commands. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
        if len(text) > _MOST_FILE_BYTES:
            raise SettingsError(f"--config: {path} is larger than {_MOST_FILE_BYTES} bytes")
        content = yaml.load(text, _Values) or {}  # of bytes YAML knows the encoding, whatever the locale
    except OSError as error:
        raise SettingsError(f"--config: cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"--config: {path} must map names to values")
    known = (ALL_NAMES | cls.model_fields.keys()) - {"config"}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            meant = closest(name, known)
            hint = f", did you mean {meant.replace('_', '-')!r}?" if meant else ""
            raise SettingsError(f"--config: {path} has an unknown key {key!r}{hint}")
        if name in values:
            raise SettingsError(f"--config: {path} sets {key!r} twice")
        values[name] = value
    return {name: value for name, value in values.items() if name in cls.model_fields}


def _describe(error: ValidationError, flags: Mapping[str, Any], in_file: Mapping[str, Any], path: object) -> str:
    """The first error as one line: flag, source of the value, problem."""
    first = error.errors(include_url=False)[0]
    text = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # a rule about several fields: its text names them
        return text
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{flag_name(name)}: required"
    if first["type"] != "value_error":
        text = f"{text}, not {first['input']!r}"
    if name in flags:
        return f"{flag_name(name)}: {text}"
    origin = str(path) if name in in_file else env_name(name)
    return f"{flag_name(name)} (from {origin}): {text}"
