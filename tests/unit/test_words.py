"""Names and texts follow the field's terms: no identifier and no phrase that was replaced by one comes back."""

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path
from tokenize import COMMENT, generate_tokens
from typing import Final

import pytest

from tests.words import PHRASES

ROOT: Final = Path(__file__).resolve().parents[2]

# Replaced as whole names; those without a leading underscore also where they have one. The comments say by what.
_NAMES: Final = frozenset(
    {
        # core, retrieval: RetrievalParams, ArmResult, rank_candidates, missing_ids, AckTracker, partition queue, clear
        *("Rules", "Found", "arm_of", "gone", "Ledger", "lane", "abandon"),
        # worker: AttemptTracker, resolve_params, dead_letter, answer_with_retries, log_dlq_too_small
        *("Misfortunes", "_judge", "put_aside", "answer_eventually"),
        "tell_that_the_dead_letter_topic_is_too_small",
        # KafkaHealth, StartupRefused, preflight, set_state, wait_admitted, quiet_period_seconds, uncommitted,
        # check_port, WorkerApp
        *(
            "KafkaTrouble",
            "kafka_trouble",
            "Refused",
            "look",
            "_become",
            "admitted",
            "silence_seconds",
            "unsaid",
        ),
        *("_claim", "Anabranch"),
        # store: transaction_as, rows_scanned, limited_scan, connect_errors and explain, before_connect,
        # metadata_filter, rebuild_derived
        *("_as", "looked_at", "briefly", "refusals", "refusal", "unasked", "described", "derive_anew"),
        # wire, broker: WriterSchema, datum_validator, strict_json, NotADeadLetter, read_range, patch_connection_resets,
        # tolerate_non_utf8_header_names, BrokerProbe.run, client_cert_rejected
        *("Writer", "extent", "jsontext", "Foreign", "read_stretch", "expect_resets", "escape_header_names"),
        *("Patient", "examined", "stranger"),
        # replay, cli, tests: DeadLetter, Disposition, replay headers, RateLimiter, PartitionScan, BatchPublisher,
        # ValidateOptions, silence_client_logs, apply, OutputReader, Cluster, listener, inject
        *(
            "Letter",
            "Fate",
            "marks",
            "replay_marks",
            "Pace",
            "_Share",
            "_Posting",
            "Wishes",
            "_hush",
            "really",
        ),
        *("Outbox", "Plant", "door", "strike"),
        # builtin
        *("SHIPPED", "shipped"),
    }
)
# Replaced wherever they are a part of a name, as `asker` in `the_asker`.
_PARTS: Final = frozenset(
    {
        "anew",
        "asker",
        "askers",
        "aside",
        "mend",
        "mended",
        "misfortunes",
        "MOST",
        "told",
        "unforeseen",
        "wishes",
    }
)
# In SQL, also as the end or the beginning of a name: metadata_changed, stale.
_SQL_AFFIXES: Final = re.compile(r".*_described(_\w+)?|(anabranch_)?wrong_.*")
_MODULES: Final = frozenset({"streams/worker/health.py"})  # dependency_health

# File to names that mean something else there, or cannot be renamed.
_OF_VERSION_1: Final = frozenset(
    {
        *("anabranch_document_described", "anabranch_chunk_described", "anabranch_derive_anew"),
        *("anabranch_wrong_documents", "anabranch_wrong_chunks"),
        *("anabranch_wrong_topics", "anabranch_wrong_metadata"),
    }
)
_EXCEPTIONS: Final[dict[str, frozenset[str]]] = {
    # What stores of version 1 hold: the step to version 2 replaces and drops it by these names.
    "schemas/postgres/steps/002.sql": frozenset(
        {"anabranch_document_described", "anabranch_chunk_described"}
    ),
    "schemas/postgres/steps/002_prune.sql": _OF_VERSION_1,
    # A recorded store of version 1.
    "tests/integration/store/schema_version_1.sql": _OF_VERSION_1
    | {
        f"anabranch_{table}_described_{event}"
        for table in ("document", "chunk")
        for event in ("inserted", "updated", "deleted", "truncated")
    },
}

_PHRASE: Final = re.compile("|".join(PHRASES), re.IGNORECASE)
# File to excerpts of its texts that keep their wording.
_TEXT_EXCEPTIONS: Final[dict[str, tuple[str, ...]]] = {
    # A key of `anabranch replay --json`, which is stable.
    "streams/replay/dead_letters.py": ("gone",),
    # A key of `anabranch stats --json`, which is stable.
    "streams/store/statistics.py": ("most_common",),
    # A value in `anabranch validate --json`, which is stable.
    "streams/evaluation/vectors.py": ("askers",),
    # The clocks of machines; the phrase stands for the consumer group's timeouts.
    "streams/worker/event_processor.py": ("Clocks differ",),
}


def _identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Of names, attributes, arguments, keywords, functions, classes, imports and patterns."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module", "rest"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                for part in name.split("."):
                    yield part, getattr(node, "lineno", 1)


def _is_replaced(name: str) -> bool:
    return bool(name in _NAMES or name.lstrip("_") in _NAMES or not _PARTS.isdisjoint(name.split("_")))


def _found_in(path: Path) -> Iterator[str]:
    file = path.relative_to(ROOT).as_posix()
    allowed = _EXCEPTIONS.get(file, frozenset())
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        if file in _MODULES or _is_replaced(path.stem):
            yield f"{file}: the module's name"
        names = _identifiers(ast.parse(text))
    else:
        code = "\n".join(line.partition("--")[0] for line in text.splitlines())
        # A fragment's name stands in a comment.
        code += "\n".join(re.findall(r"^-- name: (\w+)", text, re.MULTILINE))
        names = (
            (match[0], code.count("\n", 0, match.start()) + 1) for match in re.finditer(r"[A-Za-z_]\w*", code)
        )
    for name, line in names:
        if name not in allowed and (
            _is_replaced(name) or (path.suffix == ".sql" and _SQL_AFFIXES.fullmatch(name))
        ):
            yield f"{file}:{line}: {name}"


def _files() -> list[Path]:
    return sorted(
        path
        for folder in ("streams", "examples", "tests", "benchmarks", "schemas")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".sql"}
    )


def test_no_replaced_name_comes_back() -> None:
    files = _files()
    assert len(files) > 200
    assert not (found := [line for path in files for line in _found_in(path)]), "\n".join(found)


def test_every_exception_is_needed() -> None:
    """One that is not is a hole for the next name."""
    for file, names in _EXCEPTIONS.items():
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        assert not [name for name in names if not re.search(rf"\b{name}\b", text)], file


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string, docstring and comment; of other files than Python's, the whole text."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        # A phrase may continue in the next line of a comment.
        yield 1, re.sub(r"\n\s*--", "\n", source)
        return
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            constants = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield node.lineno, "".join(map(str, constants))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value
    first, last, comment = 0, 0, ""
    for token in generate_tokens(io.StringIO(source).readline):
        if token.type == COMMENT:
            if token.start[0] != last + 1:
                yield first, comment
                first, comment = token.start[0], ""
            last = token.start[0]
            comment += token.string.lstrip("#") + " "
    yield first, comment


def _phrases_in(path: Path) -> Iterator[str]:
    file = path.relative_to(ROOT).as_posix()
    for line, text in _texts(path):
        for excerpt in _TEXT_EXCEPTIONS.get(file, ()):
            text = text.replace(excerpt, " ")  # noqa: PLW2901  # the text to search
        for match in _PHRASE.finditer(" ".join(text.split())):
            yield f"{file}:{line}: {match[0]}"


def _files_with_texts() -> list[Path]:
    """Code, pages and SQL. The sample's documents are not messages; Avro's come from the contracts."""
    return sorted(
        path
        for folder in ("streams", "examples", "schemas")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".sql", ".html"}
    )


def test_no_replaced_phrase_comes_back() -> None:
    files = _files_with_texts()
    assert len(files) > 110
    assert not (found := [line for path in files for line in _phrases_in(path)]), "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        'raise ValueError("embedding has no component that is not zero")',
        'logger.info(f"{name} is no " "UUID")',
        '"""The texts that the\n\nasker may read."""',
        "pass  # tried for ever",
        "# Whatever nobody\n# foresaw.",
    ],
)
def test_a_replaced_phrase_is_found_wherever_it_stands(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert [line for _, found in _texts(path) if (line := _PHRASE.search(" ".join(found.split())))]


def test_every_excerpt_is_needed() -> None:
    for file, excerpts in _TEXT_EXCEPTIONS.items():
        texts = [text for _, text in _texts(ROOT / file)]
        for excerpt in excerpts:
            assert [text for text in texts if excerpt in text and _PHRASE.search(excerpt)], (file, excerpt)
