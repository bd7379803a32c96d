"""The parts of the documentation that follow from the code. ``python -m tests.reference`` writes them to the pages.

A generated part of a page stands between two comments. In some of its tables, the last cell of each row is written by
hand: it is kept, and a new row has an empty one. The code determines everything else.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter
from pydantic_settings import BaseSettings

from streams.cli.main import commands
from streams.core.profiles import BUILTIN_PROFILES, Profile
from streams.settings import EmbedderSettings, EmbeddingSettings, IngestionSettings, Settings, secret_names
from streams.telemetry.metrics import EmbedderMetrics, Metrics, StageMetrics
from streams.wire.derive import derive
from tests import commands_page
from tests.python_reference import MODULES, documented
from tests.setting_readers import CLIENT, readers

__all__ = ["BLOCKS", "METRICS", "PAGES", "ROOT", "blocks_of", "cells_of", "generated", "label_values"]

ROOT: Final = Path(__file__).resolve().parents[1]
_BLOCK: Final = re.compile(
    r"(?P<begin>^<!-- generated: (?P<name>[\w.-]+) -->\n\n)(?P<body>.*?)(?P<end>^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)
_NONE: Final = "–"

Rows: TypeAlias = Mapping[str, Sequence[str]]
#: Writes a part of a page, given the rows that it has.
Block: TypeAlias = Callable[[Rows], Iterable[str]]


def cells_of(text: str) -> dict[str, list[str]]:
    """The rows of all tables whose first cell begins with code: that code to the row's cells."""
    found = {}
    for line in text.splitlines():
        if first := re.match(r"\| \[?`([^`]+)`", line):
            found[first[1]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return found


def blocks_of(text: str) -> dict[str, str]:
    """The generated parts of a page, by name."""
    return {block["name"]: block["body"] for block in _BLOCK.finditer(text)}


def generated(page: str, text: str) -> str:
    """A page with its generated parts as the code has them."""

    def written(block: re.Match[str]) -> str:
        lines = BLOCKS[page, block["name"]](cells_of(block["body"]))
        return block["begin"] + "".join(f"{line}\n" for line in lines) + "\n" + block["end"]

    return _BLOCK.sub(written, text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _kept(before: Rows, name: str) -> str:
    """The cell that is written by hand."""
    return before[name][-1] if name in before else ""


# JSON Schema, of a contract or of the settings

_NAMED: Final = {
    "uuid": "UUID",
    "instant": "date and time",
    "version": "version",
    "string_map": "map of text to text",
    "texts_map": "map of text to 1 to 64 texts",
    "path": "path",
    "password": "text",
    "ipv4": "IP address",
}
_RANGES: Final[Mapping[tuple[float | None, float | None], str]] = {
    (-(2**31), 2**31 - 1): "of 32 bits",
    (-3.4028234663852886e38, 3.4028234663852886e38): "in float32's range",
    (-sys.float_info.max, sys.float_info.max): "",
}
_TYPES: Final = {"string": "text", "object": "object", "boolean": "true or false"}


def _plain(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without references and null; the name of what it refers to is its format."""
    found: dict[str, Any] = {}
    # Beside a type, alternatives are rules across fields.
    alternatives = () if "type" in schema else schema.get("anyOf", ())
    for part in (*schema.get("allOf", ()), *alternatives[:1]):
        found |= _plain(part, definitions)
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        found |= _plain(definitions[name], definitions) | ({"format": name} if name in _NAMED else {})
    return found | {key: value for key, value in schema.items() if key not in {"allOf", "anyOf", "$ref"}}


def _type(schema: Mapping[str, Any], definitions: Mapping[str, Any], unit: str | None = None) -> str:
    """The type and the limits."""
    plain = _plain(schema, definitions)
    values = plain.get("enum", [plain["const"]] if "const" in plain else [])
    if values:
        return ", ".join(f"`{value}`" for value in values)
    if plain.get("format") in _NAMED:
        return _NAMED[plain["format"]]
    if plain["type"] == "array":
        count = _limits(plain, "minItems", "maxItems")
        return f"array{f' of {count} items' if count else ''}, each {_type(plain['items'], definitions)}"
    if plain["type"] == "object" and isinstance(plain.get("additionalProperties"), Mapping):
        return f"map of text to {_type(plain['additionalProperties'], definitions)}"
    if plain["type"] == "string":
        limits = _limits(plain, "minLength", "maxLength")
        return f"text of {limits} characters" if limits else "text"
    limits = _limits(plain, "minimum", "maximum")
    above = f"above {plain['exclusiveMinimum']:,g}" if "exclusiveMinimum" in plain else ""
    return ", ".join(filter(None, [unit or _TYPES.get(plain["type"], plain["type"]), above, limits]))


def _limits(schema: Mapping[str, Any], least: str, most: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if (low, high) in _RANGES:
        return _RANGES[low, high]
    if high == sys.float_info.max:
        high = None
    if low is None or high is None:
        return f"at least {low:,}" if low is not None else f"at most {high:,}" if high is not None else ""
    return f"{low:,} to {high:,}" if low != high else f"{low:,}"


# Settings

_KAFKA: Final = "KAFKA_BOOTSTRAP_SERVERS"
_UNITS: Final = {"SECONDS": "seconds", "BYTES": "bytes", "ROWS": "rows", "TOKENS": "tokens"}


def _settings(*kinds: type[BaseSettings], omit: Iterable[str] = ()) -> Block:
    """The settings of these classes, each once. Only the commands, and the client, that read a setting are named."""

    def write(before: Rows) -> Iterator[str]:
        rows = {}
        for kind in kinds:
            schema = TypeAdapter(kind).json_schema()["properties"]
            for field, info in kind.model_fields.items():
                name = field.upper()
                values = (
                    "text, comma-separated"
                    if isinstance(info.default, tuple)
                    else _type(schema[field], {}, _UNITS.get(name.rsplit("_", 1)[1]))
                )
                rows[name] = (
                    f"`{name}`{' *' if name in secret_names(kind) else ''}",
                    _default(info.default, before[name][1] if name in before else _NONE),
                    values,
                    _read_by(name),
                    _kept(before, name),
                )
        # Servers first.
        shown = sorted(
            rows.keys() - set(omit), key=lambda name: (name.startswith("ANABRANCH_"), [*rows].index(name))
        )
        return _table(("setting", "default", "values", "read by", ""), [rows[name] for name in shown])

    return write


def _read_by(name: str) -> str:
    every = readers()
    if name != _KAFKA and every[name] == every[_KAFKA]:
        return "all that use Kafka"
    return ", ".join(sorted(every[name], key=[*commands.commands, CLIENT].index)) or _NONE


def _default(value: Any, before: str) -> str:
    """What is not set may have a meaning, which is written by hand."""
    if value is None:
        return _NONE if re.fullmatch(r"`[^`]*`", before) else before
    if isinstance(value, tuple):
        value = ",".join(value)
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


# Metrics


def _metrics(make: Callable[[], StageMetrics], prefix: str) -> Block:
    def write(before: Rows) -> Iterator[str]:
        rows = []
        for family in make().registry.collect():
            if not family.name.startswith(prefix):
                continue
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            unit = family.name.rsplit("_", 1)[1]
            rows.append(
                (
                    f"`{name}`",
                    family.type,
                    ", ".join(f"`{label}`" for label in sorted(labels)),
                    unit if unit in {"seconds", "bytes"} else "",
                    _kept(before, name),
                )
            )
        # As they are on the page; new ones come last.
        places = {name: place for place, name in enumerate(before)}
        rows.sort(key=lambda row: places.get(row[0].strip("`"), len(places)))
        return _table(("metric", "type", "labels", "unit", ""), rows)

    return write


def _worker_metrics() -> Metrics:
    return Metrics(
        profiles=["extraction"],
        pool=lambda: [("idle", 0), ("busy", 0)],
        lag=lambda: [(0, 0)],
        committed=lambda: [(0, 0)],
        oldest_waiting=lambda: [(0, 0.0)],
    )


def _embedder_metrics() -> EmbedderMetrics:
    return EmbedderMetrics(
        lag=lambda: [(0, 0)], committed=lambda: [(0, 0)], oldest_waiting=lambda: [(0, 0.0)]
    )


def label_values(make: Callable[[], StageMetrics]) -> dict[str, dict[str, set[str]]]:
    """Metric to label to the values that exist from the start."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in make().registry.collect():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    found.setdefault(name, {}).setdefault(label, set()).add(value)
    return found


# Profiles


def _profiles(before: Rows) -> Iterator[str]:
    rows = [
        (
            f"`{name}`",
            f"{profile.k_default}, {profile.k_min}–{profile.k_max}",
            profile.order,
            "expand" if profile.expand_parents else "no",
            "none" if profile.similarity_threshold is None else f"{profile.similarity_threshold:g}",
            "none" if profile.token_budget is None else f"{profile.token_budget:,}, {profile.overflow}",
            _kept(before, f"{name}"),
        )
        for name, profile in BUILTIN_PROFILES.items()
    ]
    return _table(("profile", "k default, range", "order", "parents", "threshold", "budget", "for"), rows)


def _profile_keys(before: Rows) -> Iterator[str]:
    del before
    schema = Profile.model_json_schema()
    texts = dict(re.findall(r"^    (\w+): (.*)$", inspect.getdoc(Profile) or "", re.MULTILINE))
    rows = [
        (
            f"`{name}`",
            _type(key, {}),
            "required" if name in schema["required"] else _default(key["default"], _NONE),
            texts[name].rstrip(".").replace("``", "`").replace("None: ", "without it "),
        )
        for name, key in schema["properties"].items()
    ]
    return _table(("key", "values", "default", "meaning"), rows)


# Contracts


def _fields(contract: str) -> Block:
    path = ROOT / "contracts" / contract

    def write(before: Rows) -> Iterator[str]:
        del before
        schema = json.loads(path.read_text(encoding="utf-8"))
        rows = _rows_of(schema, derive(schema), schema["definitions"], "")
        return _table(("field", "type", "may be", "Avro", "meaning"), rows)

    return write


def _rows_of(
    schema: Mapping[str, Any], avro: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, ...]]:
    avro_types = {field["name"]: field["type"] for field in avro["fields"]}
    for name, field in schema["properties"].items():
        plain = _plain(field, definitions)
        may_be = [
            state
            for state, is_valid in (
                ("null", {"type": "null"} in field.get("anyOf", ())),
                ("absent", name not in schema.get("required", ())),
            )
            if is_valid
        ]
        yield (
            f"`{prefix}{name}`",
            _type(field, definitions),
            ", ".join(may_be) or _NONE,
            _avro(avro_types[name]),
            _as_markdown(plain["description"]),
        )
        suffix, inner = {
            "array": ("[].", plain.get("items", {})),
            "object": ("{}.", plain.get("additionalProperties", {})),
        }.get(plain["type"], ("", {}))
        if "properties" in plain:
            suffix, inner = ".", plain
        inner = _plain(inner, definitions)
        if "properties" in inner:
            yield from _rows_of(inner, _record(avro_types[name]), definitions, f"{prefix}{name}{suffix}")


def _as_markdown(text: str) -> str:
    """As Markdown: names of several words are code."""
    return re.sub(r"[a-z0-9]+(?:_[a-z0-9]+)+", r"`\g<0>`", re.sub(r"[|<*]", r"\\\g<0>", text))


def _avro(kind: Any) -> str:
    if isinstance(kind, list):
        return " or ".join(_avro(each) for each in kind)
    if isinstance(kind, str):
        return kind.rsplit(".", 1)[-1]
    inner = kind.get("items", kind.get("values"))
    return str(kind.get("name", kind["type"])) + (f" of {_avro(inner)}" if inner is not None else "")


def _record(kind: Any) -> Mapping[str, Any]:
    """The record in a type."""
    if isinstance(kind, list):
        [kind] = [each for each in kind if each != "null"]
    return kind if "fields" in kind else _record(kind.get("items", kind.get("values")))


def _python(module: str) -> Block:
    def write(before: Rows) -> Iterator[str]:
        del before
        *lines, _ = documented(module)
        return iter(lines)

    return write


# Tables


def _columns() -> dict[str, dict[str, tuple[str, ...]]]:
    """Table to column to type, whether it may be null, default and keys; from the reference schema."""
    files = (ROOT / "schemas/postgres" / name for name in ("001_tables.sql", "002_derived.sql"))
    sql = "\n".join(re.sub(r"--.*", "", file.read_text(encoding="utf-8")) for file in files)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for table, body in re.findall(r"CREATE TABLE IF NOT EXISTS public\.(\w+) \((.*?)\n\);", sql, re.DOTALL):
        lines = [line.strip().rstrip(",") for line in body.splitlines() if line.strip()]
        keys = [name for line in lines for name in re.findall(r"^PRIMARY KEY \((.*)\)", line)]
        primary = keys[0].split(", ") if keys else []
        found[table] = dict(_column(line, primary) for line in lines if not line.startswith("PRIMARY KEY"))
    for table, line in re.findall(
        r"^ALTER TABLE public\.(\w+) ADD COLUMN IF NOT EXISTS (.*);$", sql, re.MULTILINE
    ):
        name, cells = _column(line, [])
        # An existing table gets the same column as a new one.
        assert found[table].setdefault(name, cells) == cells, (table, name)
    return found


def _column(line: str, primary: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    column = re.fullmatch(r"(\w+) ((?:double precision|\w+)(?:\[\]|\(\d+\))?) ?(.*)", line)
    assert column is not None, line
    name, kind, rest = column.groups()
    is_key = name in primary or "PRIMARY KEY" in rest
    default = re.search(r"DEFAULT ('[^']*'|\S+)", rest)
    other = re.search(r"REFERENCES public\.(\w+)", rest)
    keys = [*(["primary"] if is_key else []), *([f"foreign (`{other[1]}`)"] if other else [])]
    generated_value = "generated" if "GENERATED" in rest else _NONE
    return name, (
        kind,
        "no" if is_key or "NOT NULL" in rest else "yes",
        f"`{default[1]}`" if default else generated_value,
        ", ".join(keys),
    )


def _table_of(name: str) -> Block:
    def write(before: Rows) -> Iterator[str]:
        rows = [(f"`{column}`", *cells, _kept(before, column)) for column, cells in _columns()[name].items()]
        return _table(("column", "type", "null", "default", "key", "meaning"), rows)

    return write


#: Page to the metrics that it describes.
METRICS: Final[Mapping[str, Callable[[], StageMetrics]]] = {
    "docs/metrics.md": _worker_metrics,
    "docs/embedding.md": _embedder_metrics,
}
#: Page and name of each generated part.
BLOCKS: Final[Mapping[tuple[str, str], Block]] = {
    ("docs/settings.md", "settings"): _settings(
        Settings, IngestionSettings, omit=["ANABRANCH_EMBEDDING_PROVIDER"]
    ),
    ("docs/embedding.md", "settings"): _settings(EmbedderSettings, EmbeddingSettings),
    ("docs/metrics.md", "metrics"): _metrics(_worker_metrics, ""),
    ("docs/embedding.md", "metrics"): _metrics(_embedder_metrics, "anabranch_"),
    **{
        (f"contracts/{path}/README.md", "fields"): _fields(f"{path}/{name}.schema.json")
        for path, name in (
            ("query_embedding/v1", "query_embedding"),
            ("query_text/v1", "query_text"),
            ("retrieval/v1", "retrieval_result"),
        )
    },
    ("docs/retrieval.md", "profiles"): _profiles,
    ("docs/retrieval.md", "profile-keys"): _profile_keys,
    **{("docs/tables.md", table): _table_of(table) for table in _columns()},
    **{("docs/python.md", module): _python(module) for module in MODULES},
}
PAGES: Final = sorted({page for page, _ in BLOCKS})


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(generated(page, path.read_text(encoding="utf-8")), encoding="utf-8")
    commands_page.PAGE.write_text(
        commands_page.with_help(commands_page.PAGE.read_text(encoding="utf-8")), encoding="utf-8"
    )
