"""`anabranch settings`: every setting with its value and origin, secrets masked."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final, Literal
from urllib.parse import unquote

from pydantic import SecretStr
from rich.table import Table

from streams.configured import broker_connection, load_profiles, open_codec, result_contract
from streams.settings import load, load_all, secret_names
from streams.terminal import Console, Text, echo, json_text, printable

__all__ = ["ListedSetting", "as_json", "read", "show"]

_MASK: Final = "***"
_NOT_SET: Final = "–"
_CONNECTION_STRING: Final = "_CONNECTION_STRING"

# An address with nothing in an unexpected place. In any other, a part of the password could be anywhere.
_ADDRESS: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?:(?P<user>[^:/?#@\s]*)(?P<password>:[^:/?#@\s]*)?@)?"
    r"(?P<host>(?:\[[0-9a-fA-F:.]+\]|[^:/?#@,;&=\s]*)(?::\d+)?"
    r"(?:,(?:\[[0-9a-fA-F:.]+\]|[^:/?#@,;&=\s]*)(?::\d+)?)*)"
    r"(?P<path>/[^?#@;&=\s]*)?(?:\?(?P<query>[^#@\s]*))?"
)
# A value that cannot hide a second parameter, a password or a key.
_SIMPLE: Final = re.compile(r"[\w./,+~*\[\]-]*")
_HOSTS: Final = re.compile(r"[\w./,+~*\[\]:-]*")
_KEY: Final = "-----BEGIN"
# Parameters of a connection string that are shown.
_HARMLESS: Final = frozenset(
    {
        *("host", "port", "user", "dbname", "database", "service", "passfile", "application_name"),
        *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "sslnegotiation", "target_session_attrs"),
        *(
            "ssl_min_protocol_version",
            "ssl_max_protocol_version",
            "krbsrvname",
            "gsslib",
            "search_path",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ListedSetting:
    """One setting as it is shown.

    Attributes:
        name: of the environment variable.
        value: in force, masked if it is a secret; None: not set.
        origin: where the value comes from.
        file: its path, if it comes from one.
    """

    name: str
    value: str | int | float | None
    origin: Literal["default", "environment", "file"]
    file: str | None = None


def read(environment: Mapping[str, str] | None = None) -> list[ListedSetting]:
    """All settings, after the checks that a worker runs on them at start.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid setting.
    """
    environment = os.environ if environment is None else environment
    worker = load(environment)
    broker_connection(worker)
    load_profiles(worker)
    open_codec(worker)
    result_contract(worker)
    found: dict[str, ListedSetting] = {}
    for settings in load_all(environment):
        secrets = secret_names(type(settings))
        for field in type(settings).model_fields:
            name = field.upper()
            if name not in found:
                value = _shown(name, getattr(settings, field))
                found[name] = _listed(name, value, environment, is_secret=name in secrets)
    return list(found.values())


def _listed(
    name: str, value: str | float | None, environment: Mapping[str, str], *, is_secret: bool
) -> ListedSetting:
    if environment.get(name):
        return ListedSetting(name, value, "environment")
    file = environment.get(f"{name}_FILE") if is_secret else None
    return ListedSetting(name, value, "file", file) if file else ListedSetting(name, value, "default")


def _shown(name: str, value: Any) -> str | int | float | None:
    if isinstance(value, SecretStr):
        return _masked_dsn(value.get_secret_value()) if name.endswith(_CONNECTION_STRING) else _MASK
    if value is None or isinstance(value, (int, float)):
        return value
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    if _KEY in text:
        return _MASK  # a key instead of its file's name
    is_url = name.endswith("_URL") or ("://" in text and not isinstance(value, PurePath))
    return _masked_url(text) if is_url else text


def _masked_dsn(dsn: str) -> str:
    """The connection string with passwords masked; all of it, if it is not certain where a password is."""
    match = _ADDRESS.fullmatch(dsn)
    if match is None or not _SIMPLE.fullmatch(unquote(match["path"] or "")):
        return _MASK
    login = ""
    if match["user"] is not None:
        user = _MASK if ":" in unquote(match["user"]) else match["user"]
        login = f"{user}{':' + _MASK if match['password'] else ''}@"
    return _joined(match, login, _masked_parameter)


def _masked_url(url: str) -> str:
    """The address of a service: a user name there may be a token, and any parameter may be a key."""
    match = _ADDRESS.fullmatch(url)
    if match is None:
        return _MASK
    login = f"{_MASK}@" if match["user"] or match["password"] else ""
    return _joined(
        match,
        login,
        lambda parameter: f"{parameter.partition('=')[0]}={_MASK}" if "=" in parameter else _MASK,
    )


def _joined(match: re.Match[str], login: str, mask: Callable[[str], str]) -> str:
    query = "" if match["query"] is None else "?" + "&".join(map(mask, match["query"].split("&")))
    return f"{match['scheme']}{login}{match['host']}{match['path'] or ''}{query}"


def _masked_parameter(parameter: str) -> str:
    name, equals, value = parameter.partition("=")
    if not equals:
        return _MASK
    known = unquote(name).lower()
    simple = _HOSTS if known == "host" else _SIMPLE
    return parameter if known in _HARMLESS and simple.fullmatch(unquote(value)) else f"{name}={_MASK}"


def as_json(found: Sequence[ListedSetting]) -> str:
    """The settings as a JSON array; its keys are those of `ListedSetting`."""
    return json_text([asdict(setting) for setting in found], indent=2)


def show(found: Sequence[ListedSetting]) -> None:
    """Print a table on a terminal, else a line for each setting."""
    rows = [
        (setting.name, _NOT_SET if setting.value is None else str(setting.value), _origin(setting))
        for setting in found
    ]
    if not sys.stdout.isatty():
        names, values = (max(len(printable(row[column])) for row in rows) for column in (0, 1))
        for name, value, origin in rows:
            echo(f"{name:{names}}  {printable(value):{values}}  {printable(origin)}")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, value, origin in rows:
        style = "dim" if origin == "default" else ""
        table.add_row(Text(name, style), Text(value, style), Text(origin, style))
    Console().print(table)


def _origin(setting: ListedSetting) -> str:
    return setting.origin if setting.file is None else f"file {setting.file}"
