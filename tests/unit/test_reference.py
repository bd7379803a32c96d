"""The reference and the code say the same: what exists is documented, and what is documented exists."""

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Final

import click
import pytest

from k8s.observability.rules import Parameters, Record, groups
from streams.cli.main import commands
from streams.core import replies
from streams.core.embedding_errors import text_codes_that_fail_again, text_dead_letter_codes
from streams.core.headers import _OF_THE_VALUE, _OF_THE_VALUE_BY_PREFIX
from streams.replay import journal
from streams.settings import (
    EmbedderSettings,
    EmbeddingSettings,
    IngestionSettings,
    Settings,
    environment_names,
    secret_names,
)
from streams.store.statistics import Statistics
from streams.telemetry.metrics import EMBEDDER_STAGES, STAGES
from streams.wire import deadletter, replay_headers
from streams.worker.dependency_health import DependencyState
from streams.worker.readiness import Readiness
from tests.metric_names import metric_names
from tests.python_reference import MODULES, Entry, entries
from tests.reference import BLOCKS, METRICS, PAGES, ROOT, blocks_of, cells_of, generated, label_values
from tests.setting_readers import readers

FOLDERS: Final = [
    path
    for path in sorted(ROOT.iterdir())
    if path.is_dir() and not path.name.startswith(".") and path.name not in {"build", "dist"}
]
MARKDOWN: Final = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in FOLDERS for page in sorted(folder.rglob("*.md"))),
]
_BLOCK: Final = re.compile(r"(?ms)^ *```[^\n]*\n(.*?)^ *```$")
KINDS: Final = (Settings, EmbeddingSettings, EmbedderSettings, IngestionSettings)
SETTINGS: Final = {
    name
    for kind in KINDS
    for name in (*environment_names(kind), *(f"{secret}_FILE" for secret in secret_names(kind)))
}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section_of(page: str, heading: str) -> str:
    return text_of(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def code_in(text: str) -> list[str]:
    """The spans of code, without blocks."""
    return re.findall(r"`([^`]+)`", _BLOCK.sub("", text))


# What `python -m tests.reference` writes


@pytest.mark.parametrize("page", PAGES)
def test_the_generated_parts_are_those_of_the_code(page: str) -> None:
    text = text_of(page)
    assert text == generated(page, text), "run: python -m tests.reference"
    assert {(page, name) for name in blocks_of(text)} == {key for key in BLOCKS if key[0] == page}


@pytest.mark.parametrize("page", PAGES)
def test_every_row_says_what_it_means(page: str) -> None:
    for name, block in blocks_of(text_of(page)).items():
        assert not [first for first, cells in cells_of(block).items() if not cells[-1]], name


def test_a_part_notices_what_is_new_and_what_is_deleted() -> None:
    page = "docs/settings.md"
    text = text_of(page)
    [row] = re.findall(r"^\| `ANABRANCH_CONCURRENCY` .*\n", text, re.MULTILINE)
    renamed = row.replace("ANABRANCH_CONCURRENCY", "ANABRANCH_PARALLEL")
    for broken in ("", renamed, row + renamed, row.replace("`8`", "`9`"), row.replace("1,000", "10")):
        written = generated(page, text.replace(row, broken))
        assert written != text.replace(row, broken)
        assert "ANABRANCH_PARALLEL" not in written
        assert "\n| `ANABRANCH_CONCURRENCY` | `8` | integer, 1 to 1,000 |" in written
    reworded = text.replace(row, row.replace("events processed", "events answered"))
    assert generated(page, reworded) == reworded


def test_the_readers_of_a_setting_are_those_in_the_code() -> None:
    """A sample, from the commands' modules."""
    read: dict[str, set[str]] = {}
    for setting, names in readers().items():
        for name in names:
            read.setdefault(name, set()).add(setting)
    assert read["stats"] == {"DATABASE_ADMIN_CONNECTION_STRING"}
    assert read["migrate"] == read["stats"] | {
        "ANABRANCH_EMBEDDING_DIMENSIONS",
        "ANABRANCH_PRINCIPALS_SETTING",
    }
    assert read["tail"] >= {
        "KAFKA_SASL_PASSWORD",
        "ANABRANCH_TEXT_DEAD_LETTER_TOPIC",
        "ANABRANCH_OUTPUT_TOPIC",
    }
    assert read["ingest"] >= {"DATABASE_INGESTION_CONNECTION_STRING", "ANABRANCH_EMBEDDING_API_KEY"}
    assert not read["ingest"] & {"DATABASE_CONNECTION_STRING", "KAFKA_BOOTSTRAP_SERVERS"}
    assert not read["embedder"] & {"DATABASE_CONNECTION_STRING", "ANABRANCH_OUTPUT_TOPIC"}
    assert "completion" not in read
    assert [setting for setting, names in readers().items() if not names] == [
        "SCHEMA_REGISTRY_URL"
    ]  # rejected


# Values of labels, codes


@pytest.mark.parametrize("page", METRICS)
def test_a_metric_s_row_has_the_values_of_its_labels_and_no_others(page: str) -> None:
    rows = cells_of(blocks_of(text_of(page))["metrics"])
    seen = set()
    for metric, labels in label_values(METRICS[page]).items():
        if metric not in rows:
            assert not metric.startswith("anabranch_")
            continue
        meaning = rows[metric][-1]
        for label, values in labels.items():
            # These depend on the installation, or have a table of their own.
            if label in {"profile", "partition", "version", "generation"} or (
                label == "code" and "](" in meaning
            ):
                continue
            named = {code for code in code_in(meaning) if re.fullmatch(r"[a-z_]+", code)}
            # Sums have the labels of the counter above them.
            assert named in ({*values}, set()), metric
            assert named or metric in {"anabranch_live_recall_sum", "anabranch_live_recall_squares_sum"}, (
                metric
            )
            seen.add(label)
    assert seen >= {"stage", "cause", "outcome"}


def test_the_page_says_the_same_as_replay_about_texts_that_fail_again() -> None:
    rows = [
        line for line in section_of("docs/embedding.md", "Dead letters").splitlines() if line[:3] == "| `"
    ]
    own = {
        cells[0]: cells[-1] for cells in (list(map(str.strip, row.strip("| ").split("|"))) for row in rows)
    }
    advice = {code: text for cell, text in own.items() for code in code_in(cell) if text != "as there"}
    assert advice.keys() < text_dead_letter_codes()
    for code, text in advice.items():
        assert ("a replay fails again" in text) == (code in text_codes_that_fail_again()), code
        assert ("then replay" in text) != ("a replay fails again" in text), code


def test_the_stages_in_a_dead_letter_s_header_are_named() -> None:
    for page, stages in (("docs/delivery.md", STAGES), ("docs/embedding.md", EMBEDDER_STAGES)):
        [sentence] = re.findall(r"stage(?:`)? is (`read`[^.]*?`publish`)", section_of(page, "Dead letters"))
        assert {code for code in code_in(sentence) if not code.startswith("_")} == {"read", *stages}


def test_every_header_is_documented_and_every_documented_one_exists() -> None:
    known = {
        value
        for module in (deadletter, replay_headers, journal, replies)
        for name, value in vars(module).items()
        if name.endswith("_HEADER")
    }
    pages = ("docs/delivery.md", "docs/replay.md", "docs/request-reply.md")
    named: set[str] = set()
    for page in pages:
        last = ""
        for code in code_in(text_of(page)):
            if re.fullmatch(
                r"(__connect\.errors|anabranch\.(error|placeholder|replay)|kafka_\w+)[\w.]*", code
            ):
                last = code
            elif not (last and re.fullmatch(r"\.[a-z.]+", code)):
                continue
            # The rest of a name that begins as the one before.
            named.add(code if code == last else _continued(last, code, known))
    assert named == known


def _continued(last: str, rest: str, known: set[str]) -> str:
    parts = last.split(".")
    starts = [".".join(parts[:length]) + rest for length in range(1, len(parts))]
    return next((start for start in starts if start in known), last + rest)


def test_the_headers_that_a_result_does_not_have_are_listed() -> None:
    [paragraph] = [
        part
        for part in text_of("docs/delivery.md").split("\n\n")
        if part.startswith("A result carries the event's key")
    ]
    listed = code_in(paragraph.partition("upper and lower case")[0])
    assert {name.lower() for name in listed} == {*_OF_THE_VALUE, *_OF_THE_VALUE_BY_PREFIX}


def test_the_keys_of_the_statistics_are_listed() -> None:
    [sentence] = re.findall(r"with stable keys: ([^.]+)\.", text_of("docs/statistics.md"))
    assert set(code_in(sentence)) == {field.name for field in fields(Statistics)}


# Recorded series that other rules are computed from.
_INTERMEDIATE: Final = re.compile(
    r".*:seen|anabranch:(slo_events|slo_bad_events|partition_\w+|live_recall_samples):.*"
)


def test_every_recorded_series_has_a_row_and_every_row_a_series() -> None:
    recorded = {
        rule.name for group in groups(Parameters()).values() for rule in group if isinstance(rule, Record)
    }
    table = text_of("docs/metrics.md").split("| recorded series | |\n")[1].split("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines()]
    assert {code for row in rows for code in code_in(row)} == {
        name for name in recorded if not _INTERMEDIATE.fullmatch(name)
    }


# Logs


@cache
def modules() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "streams").rglob("*.py")]


def logged() -> dict[str, tuple[str, set[str], set[str]]]:
    """The lines with fields: message to level, fields, and the values that a field can have."""
    found: dict[str, tuple[str, set[str], set[str]]] = {}
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                extra = [keyword.value for keyword in node.keywords if keyword.arg == "extra"]
                if extra and isinstance(extra[0], ast.Dict):
                    names = set(keys_of(extra[0]))
                    values = {
                        each.value
                        for value in extra[0].values
                        for each in ast.walk(value)
                        if isinstance(each, ast.Constant) and isinstance(each.value, str)
                    }
                    level = ast.unparse(node.func).removeprefix("logger.")
                    found[ast.literal_eval(node.args[0])] = level, names, values
    return found


def keys_of(extra: ast.Dict) -> Iterator[str]:
    for key, value in zip(extra.keys, extra.values, strict=True):
        if key is not None:
            yield ast.literal_eval(key)
        else:
            assert isinstance(value, ast.Call)
            yield from keys_returned(ast.unparse(value.func).rsplit(".", 1)[-1])


def keys_returned(function: str) -> Iterator[str]:
    """Of the dictionaries that functions of this name return."""
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
                for each in ast.walk(node):
                    if isinstance(each, ast.Return) and isinstance(each.value, ast.Dict):
                        yield from keys_of(each.value)


def test_every_log_line_with_fields_has_a_row_and_every_row_a_line() -> None:
    rows = cells_of(section_of("docs/running.md", "Logs"))
    lines = logged()
    assert rows.keys() == lines.keys()
    for message, (level, names, values) in lines.items():
        assert rows[message][1] == level, message
        named = set(code_in(rows[message][2]))
        assert names <= named, message
        assert named - names <= values, message


# The web port


def test_every_path_of_the_web_port_has_a_row_and_every_row_a_path() -> None:
    source = text_of("streams/worker/stage_app.py")
    rows = cells_of(section_of("docs/running.md", "The web port"))
    assert rows.keys() == set(re.findall(r"@app\.page\(\"([^\"]+)\"\)", source))
    named = set(code_in(rows["/healthz/ready"][1]))
    for dependency in ("store", "provider"):
        readiness = Readiness(dependency, DependencyState.UP, None, None, 1, [], stopping=False)
        assert named - {"store", "provider"} | {dependency} == set(readiness.page())


def test_the_build_arguments_of_the_image_exist() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", text_of("Dockerfile"), re.MULTILINE))
    [listed] = re.findall(r"build arguments (.*?) become labels", text_of("docs/development.md"))
    passed = [
        name
        for path in MARKDOWN
        for name in re.findall(r"--build-arg (\w+)=", path.read_text(encoding="utf-8"))
    ]
    assert {*code_in(listed), *passed} == arguments - {"PYTHON_IMAGE"}  # which the Dockerfile explains


# Contracts


@pytest.mark.parametrize("page", [page for page, name in BLOCKS if name == "fields"])
def test_the_notes_on_fields_are_on_fields_that_exist(page: str) -> None:
    text = text_of(page)
    known = {part for name in cells_of(blocks_of(text)["fields"]) for part in re.split(r"[.\[\]{}]+", name)}
    tables = re.findall(
        r"(?m)^\| (?:field|count) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text.split("<!-- generated")[0]
    )
    tables += re.findall(
        r"(?m)^\| (?:field|count) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text.split("<!-- end -->")[1]
    )
    named = {code for table in tables for row in table.splitlines() for code in code_in(row.split(" | ")[0])}
    assert named
    assert named <= known


# Python


def public() -> Iterator[tuple[str, Entry]]:
    for module in MODULES:
        for entry in entries(module):
            yield module, entry


def test_every_public_name_and_every_parameter_is_described() -> None:
    seen = set()
    for module, entry in public():
        seen.add(entry.name)
        listed = re.findall(r"(?ms)^(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", entry.text)
        explained = [
            name.strip("* ")
            for block in listed
            for names in re.findall(r"^    (?! )([\w*, ]+): ", block, re.MULTILINE)
            for name in names.split(",")
        ]
        parameters = [name.strip("*") for name in entry.parameters]
        # A class without fields of its own may have attributes.
        assert not parameters or set(explained) <= set(parameters), (module, entry.name)
        if entry.name in {
            "Client",
            "Client.retrieve",
            "Client.publish",
            "QueryOptions",
            "ingest",
            "ingestion_lines",
        }:
            assert explained == parameters, (module, entry.name)
    assert {"Client.results", "SharedClient.aretrieve", "open_documents", "UnreadableResult"} <= seen


def client_table(head: str) -> dict[str, list[str]]:
    return cells_of(text_of("docs/client.md").split(f"| {head} |")[1].split("\n\n")[0])


def test_the_client_s_page_has_every_parameter_and_no_other() -> None:
    of = {entry.name: set(entry.parameters) for entry in entries("streams.client")}
    made = {name for row in client_table("argument of `Client`").values() for name in code_in(row[0])}
    assert made == of["Client"] - {"connection"}
    asked = {name for row in client_table("argument").values() for name in code_in(row[0])}
    for method in ("Client.retrieve", "Client.publish"):
        assert asked == of[method] - {"**options"} | of["QueryOptions"], method
    connected = section_of("docs/client.md", "Connect").split("| argument")[0]
    [row] = [line for line in connected.splitlines() if "BrokerConnection" in line]
    assert set(code_in(row.split(" | ")[1])) == of["BrokerConnection"] - {"bootstrap_servers"}
    assert set(code_in(section_of("docs/client.md", "Read results: `results`"))) >= of["Client.results"] - {
        "group"
    }


def test_the_client_s_page_has_every_error_and_what_raises_it() -> None:
    raising: dict[str, set[str]] = {}
    for entry in entries("streams.client"):
        raises = entry.text.partition("Raises:\n")[2]
        for error in re.findall(r"^    (?! )(\w+): ", raises, re.MULTILINE):
            if entry.name.startswith("Client."):
                raising.setdefault(error, set()).add(entry.name.removeprefix("Client."))
    errors = {
        entry.name for entry in entries("streams.client") if "Error)" in entry.signature.splitlines()[0]
    }
    rows = client_table("error | raised by | cause")
    assert rows.keys() == errors
    for error, row in rows.items():
        expected = {"retrieve", "publish", "results"} if row[1] == "all" else set(code_in(row[1]))
        assert raising[error] == expected, error
    # And what they carry.
    for entry in entries("streams.client"):
        attributes = set(entry.parameters) - {"message"}
        if entry.name in errors and "code" in attributes:
            assert "`code`" in rows[entry.name][2], entry.name


def test_the_adapters_page_names_everything_public() -> None:
    text = text_of("docs/integrations.md")
    for module in MODULES:
        if module.startswith("streams.adapters"):
            assert module in text
            for entry in entries(module):
                name = entry.name.rsplit(".", 1)[-1]
                assert "." in entry.name or re.search(rf"\b{name}\b", text), entry.name


# Every page


def in_code(text: str) -> str:
    """What stands in code, spans and blocks."""
    return "\n".join([*_BLOCK.findall(text), *(" ".join(span.split()) for span in code_in(text))])


# Page to names that do not exist, and why they are there.
_MISSPELT: Final[Mapping[str, set[str]]] = {
    "docs/settings.md": {"ANABRANCH_CONCURENCY", "KAFKA_BOOTSTRAP_SERVER"}
}


def options() -> dict[str, set[str]]:
    """Each command to its options."""
    found: dict[str, set[str]] = {}

    def visit(command: click.Command, name: str) -> None:
        found[name] = {"--help", "-h"}
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                found[name] |= {*parameter.opts, *parameter.secondary_opts}
        if isinstance(command, click.Group):
            for inner, each in command.commands.items():
                visit(each, f"{name} {inner}")

    visit(commands, "anabranch")
    return found


def each_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in MARKDOWN])


@each_page()
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    named = set(
        re.findall(
            r"\b(?:ANABRANCH|KAFKA|DATABASE|SCHEMA_REGISTRY)_[A-Z0-9_]*[A-Z0-9]\b(?!_?\*)", text_of(page)
        )
    )
    assert named - SETTINGS == _MISSPELT.get(page, set())
    prefixes = re.findall(r"\b((?:ANABRANCH|KAFKA|DATABASE)_(?:[A-Z0-9]+_)*)\*", text_of(page))
    assert all(any(name.startswith(prefix) for name in SETTINGS) for prefix in prefixes)


def database_names() -> set[str]:
    """Tables, functions and roles."""
    files = [
        *(ROOT / "schemas").rglob("*.sql"),
        *(ROOT / "k8s").rglob("*.sql"),
        *(ROOT / "k8s/postgres").rglob("*"),
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return set(re.findall(r"\banabranch_\w+", text))


@each_page()
def test_every_metric_that_a_page_names_exists(page: str) -> None:
    samples = set(metric_names())
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples}
    recorded = {
        rule.name for group in groups(Parameters()).values() for rule in group if isinstance(rule, Record)
    }
    known = samples | families | recorded | database_names()
    text = text_of(page)
    named = set(re.findall(r"(?<![\w.:/@-])anabranch[_:][a-z0-9_:]*[a-z0-9](?![\w*]|_\*)", text))
    assert not named - known - {"anabranch_live_recall"}
    starts = re.findall(r"(?<![\w.:/@-])(anabranch[_:][a-z0-9_:]+)\*", text)
    assert all(any(name.startswith(start) for name in known) for start in starts)


@each_page()
def test_every_command_and_option_that_a_page_shows_exists(page: str) -> None:
    known = options()
    code = re.sub(r"\\\n\s*", " ", in_code(text_of(page)))
    for match in re.finditer(
        r"(?<![\w./\[=-])(?<!install )anabranch ((?:[a-z]+\b(?!:) ?)+)([^\n|;#&>]*)", code
    ):
        words = match[1].split()
        name = max(
            (name for name in known if f"anabranch {' '.join(words)} ".startswith(f"{name} ")), key=len
        )
        assert name != "anabranch" or match[0].startswith(_NO_COMMAND), match[0]
        for option in re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", match[2]):
            assert option in known[name], match[0]


#: The name that searches for live recall have in PostgreSQL.
_NO_COMMAND: Final = ("anabranch live recall",)
# Options of other programs.
_OTHER_OPTIONS: Final = {"--build-arg", "--command-config", "--auto-truncate", "--disable-triggers"}


@each_page()
def test_every_option_that_a_page_names_alone_exists(page: str) -> None:
    known = set.union(*options().values()) | _OTHER_OPTIONS
    for folder in ("benchmarks", "k8s", "tests", "streams", "requirements"):
        for path in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r"add_argument\(\s*\"(--[a-z-]+)\"", path.read_text(encoding="utf-8")))
    named = {option for span in code_in(text_of(page)) for option in re.findall(r"^(--[a-z][a-z-]+)", span)}
    assert not named - known


def names_in_code() -> set[str]:
    """Names in code, and strings that are names; comments and prose do not count."""
    found: set[str] = set()
    for folder in ("streams", "benchmarks", "k8s", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for name in ("id", "attr", "arg", "name"):
                    found.add(str(getattr(node, name, "")))
                if isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
                    found.update(str(node.value).split("."))
    folders = ("contracts", "schemas", "k8s", "streams")
    for path in (*(each for folder in folders for each in (ROOT / folder).rglob("*")), *ROOT.glob("*")):
        if path.suffix in {".sql", ".json", ".avsc", ".yaml", ".yml", ".toml"}:
            text = re.sub(r"--.*|(?m:^\s*#.*)", "", path.read_text(encoding="utf-8"))
            found.update(re.findall(r"\w+", text))
    return found


# PostgreSQL's own.
_OTHER_CODES: Final = {"pg_dump", "pg_read_all_stats", "pg_restore", "transaction_timeout"}


def test_every_code_that_a_page_names_exists() -> None:
    known = names_in_code() | set(metric_names()) | _OTHER_CODES
    unknown = {
        f"{path.relative_to(ROOT)}: {code}"
        for path in MARKDOWN
        for code in code_in(path.read_text(encoding="utf-8"))
        if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", code) and code not in known
    }
    assert not unknown


# Page to paths that it names although they do not exist: deleted ones, and files that its commands write.
_MISSING: Final[Mapping[str, set[str]]] = {
    "CHANGELOG.md": {"schemas/postgres/005_access.sql", "streams/store/queries.sql"},
    "docs/request-reply.md": {
        "schemas/retrieval_result.1.0.0.avsc",
        "schemas/retrieval_result.1.1.0.avsc",
    },
}


@each_page()
def test_every_file_and_module_that_a_page_names_exists(page: str) -> None:
    text = text_of(page)
    folders = {path.name for path in FOLDERS}
    missing = {
        code
        for code in code_in(text)
        if re.fullmatch(r"[\w.-]+/[\w./*-]*", code) and code.split("/")[0] in folders
        if not any(ROOT.glob(code.rstrip("/")))
    }
    assert missing == _MISSING.get(page, set())
    for module in set(re.findall(r"\bpython3? -m ([\w.]+)", text)):
        assert module in sys.stdlib_module_names or importlib.util.find_spec(module), module


def test_every_extra_is_on_a_page_and_every_named_one_exists() -> None:
    named = {
        extra
        for path in MARKDOWN
        for found in re.findall(r"\banabranch\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    assert named == set(project["optional-dependencies"])


def test_every_make_target_is_on_a_page_and_every_named_one_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", text_of("Makefile"), re.MULTILINE))
    named = {
        target
        for path in MARKDOWN
        for target in re.findall(
            r"^(?:\$ )?make ([a-z0-9-]+)", in_code(path.read_text(encoding="utf-8")), re.MULTILINE
        )
    }
    assert named == targets
