"""How `anabranch check` prints what it found."""

import io
import json

from streams.cli import check
from streams.cli.check import CheckReport
from streams.store.findings import Finding
from streams.terminal import Console

OK = Finding("codecs", "ok", "gzip can be read")
FINDINGS = [
    OK,
    Finding("storage", "warning", "embeddings are stored out of line", "VACUUM FULL;"),
    Finding("topic", "ok", "in exists"),
    Finding("topic", "unready", "out is missing", "anabranch topics"),
    Finding("role", "refused", "the role is a superuser", "CREATE ROLE anabranch_worker LOGIN PASSWORD '…';"),
]
FACTS = [("PostgreSQL", "18.1, pgvector 0.8.5, schema version 3"), ("Kafka", "protocol of Kafka 4.1")]


def shown(report: CheckReport) -> list[str]:
    stream = io.StringIO()
    check.show(report, Console(file=stream, width=30))
    return stream.getvalue().splitlines()


def test_faults_come_first_then_facts_then_the_verdict() -> None:
    assert shown(CheckReport(FINDINGS, FACTS)) == [  # each on a line of its own, however narrow
        "refused  role: the role is a superuser",
        "         remedy: CREATE ROLE anabranch_worker LOGIN PASSWORD '…';",
        "unready  topic: out is missing",
        "         remedy: anabranch topics",
        "warning  storage: embeddings are stored out of line",
        "         remedy: VACUUM FULL;",
        "",
        "PostgreSQL  18.1, pgvector 0.8.5, schema version 3",
        "Kafka       protocol of Kafka 4.1",
        "passed      codecs",
        "",
        "a worker refuses to run here: 2 faults, 1 warning",
    ]


def test_a_fault_that_says_what_to_do_needs_no_remedy() -> None:
    refused = Finding("connection", "refused", "it must start with postgresql://", "")
    assert shown(CheckReport([refused], []))[:2] == [
        "refused  connection: it must start with postgresql://",
        "",
    ]


def test_the_verdict_is_that_of_the_worst_finding() -> None:
    assert shown(CheckReport([OK], []))[-1] == "a worker can run here"
    assert shown(CheckReport(FINDINGS[:2], []))[-1] == "a worker can run here: 1 warning"
    assert shown(CheckReport(FINDINGS[:4], []))[-1] == (
        "a worker is not ready here until this is fixed: 1 fault, 1 warning"
    )
    assert [CheckReport(FINDINGS[:count], []).can_run for count in (1, 2, 4, 5)] == [True, True, False, False]


def test_json_has_the_findings_and_nothing_else() -> None:
    found = json.loads(check.as_json(CheckReport(FINDINGS, FACTS)))
    assert [finding["check"] for finding in found] == ["codecs", "storage", "topic", "topic", "role"]
    assert found[0] == {"check": "codecs", "level": "ok", "detail": "gzip can be read", "remedy": ""}
