"""`anabranch validate` as it is called: straight to a store, and through a broker and a worker."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streams import sample
from streams.evaluation.sample import sample_lines
from tests.conftest import Database
from tests.evaluation.made_up import EMBEDDING
from tests.integration.harness import Channel

pytestmark = pytest.mark.slow

StartWorker = Callable[..., object]

CORPUS = sample.load()
ROOT = Path(__file__).resolve().parents[2]


def validate(*arguments: str, lines: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streams", "validate", *arguments],
        input=lines,
        env={"PATH": os.environ.get("PATH", ""), "COLUMNS": "110", **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def report(ended: subprocess.CompletedProcess[str], *, exit_code: int = 0) -> dict[str, Any]:
    assert ended.returncode == exit_code, ended.stderr
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


def through(channel: Channel) -> Mapping[str, str]:
    return {
        "KAFKA_BOOTSTRAP_SERVERS": channel.bootstrap_servers,
        "ANABRANCH_INPUT_TOPIC": channel.input,
        "ANABRANCH_OUTPUT_TOPIC": channel.output,
        "ANABRANCH_DEAD_LETTER_TOPIC": channel.dead_letters,
    }


def by_url(question: sample.GoldenQuery, **fields: Any) -> dict[str, Any]:
    """The question as a user would put it who knows documents and URLs, but no chunks."""
    documents = {document.id: document for document in CORPUS.documents}
    best = max(question.expected, key=lambda chunk_id: question.expected[chunk_id])
    chunk = next(chunk for chunk in CORPUS.chunks if chunk.id == best)
    return {
        "id": question.key,
        "principals": list(question.principals),
        "embedding": [float(component) for component in CORPUS.query_embedding(question)],
        "expected": [{"source_url": documents[chunk.document_id].source_url}],
    } | fields


# Straight to the store


def test_the_sample_straight_to_the_store(store: Database, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = report(
        validate(
            "--sample", "--direct", "--json", "--html", str(page), "--min-ndcg", "0.9", "--min-hit-rate", "1",
            DATABASE_CONNECTION_STRING=store.worker,
        )
    )  # fmt: skip
    assert found["passed"]
    assert found["way"] == "direct"
    assert found["queries"] == found["answered"] == len(CORPUS.queries)
    assert found["hit_rate_at_5"] == 1
    assert found["ndcg_at_10"] >= 0.9
    assert 0.9 <= found["mrr"] <= 1
    assert found["recall_at_k"] >= 0.9
    assert found["passages"] == sum(each["k_returned"] for each in found["per_query"]) > 200
    assert found["completeness"]["title"] == found["completeness"]["source_url"] == 1
    assert found["completeness"]["page"] < 1
    callers = {principal for question in CORPUS.queries for principal in question.principals}
    readable = {grant.document_id for grant in CORPUS.grants if grant.principal in {*callers, "public"}}
    embedded = [chunk for chunk in CORPUS.chunks if chunk.embedding_row is not None]
    assert found["vectors"] == {
        "count": sum(chunk.document_id in readable for chunk in embedded),
        "scope": "askers",
    }
    assert page.read_text().startswith("<!doctype html>")


def test_a_table_for_people(store: Database) -> None:
    ended = validate("--sample", "--direct", "--worst", "3", DATABASE_CONNECTION_STRING=store.worker)
    assert ended.returncode == 0
    for words in (
        "hit rate@5",
        "nDCG@10",
        "recall@k",
        "MRR",
        "latency",
        "query_time_ms",
        "vectors",
        "✓ passed",
    ):
        assert words in ended.stdout
    assert "worst queries" in ended.stdout


def test_the_owner_counts_every_vector(store: Database) -> None:
    found = report(
        validate(
            "-", "--direct", "--json",
            lines=json.dumps(by_url(CORPUS.queries[0])),
            DATABASE_CONNECTION_STRING=store.worker,
            DATABASE_ADMIN_CONNECTION_STRING=store.owner,
        )
    )  # fmt: skip
    embedded = sum(chunk.embedding_row is not None for chunk in CORPUS.chunks)
    assert found["vectors"] == {"count": embedded, "scope": "store"}


def test_documents_and_urls_are_found_as_the_caller(store: Database) -> None:
    private = next(question for question in CORPUS.queries if question.principals == ("user:42",))
    lines = [
        by_url(private, id="may", profile="docs", similarity_threshold=0),
        by_url(private, id="may not", profile="docs", similarity_threshold=0, principals=["nobody"],
               expected=[{"source_url_glob": "https://docs.example.org/*/tansy-mill"}]),
        by_url(private, id="glob", profile="docs", similarity_threshold=0, principals=None,
               expected=[{"source_url_prefix": "https://docs.example.org/"}]),
    ]  # fmt: skip
    found = report(
        validate(
            "-", "--direct", "--json", "--principal", "user:42",
            lines="\n".join(map(json.dumps, lines)),
            DATABASE_CONNECTION_STRING=store.worker,
        )
    )  # fmt: skip
    ranks = {each["id"]: each["first_relevant_rank"] for each in found["per_query"]}
    assert ranks["may"] is not None
    assert ranks["may not"] is None
    assert ranks["glob"] == 1


def test_a_bound_that_is_missed_fails(store: Database) -> None:
    ended = validate("--sample", "--direct", "--min-ndcg", "0.999", DATABASE_CONNECTION_STRING=store.worker)
    assert ended.returncode == 1
    assert "below 0.999" in ended.stdout


def test_what_can_never_succeed_is_a_dead_letter_here_too(store: Database) -> None:
    found = report(
        validate(
            "-", "--direct", "--json",
            lines="\n".join(
                json.dumps(by_url(CORPUS.queries[0], **fields))
                for fields in ({"id": "a", "profile": "nix"}, {"id": "b", "embedding_model": "other"}, {})
            ),
            DATABASE_CONNECTION_STRING=store.worker,
            ANABRANCH_EMBEDDING_MODEL="ours",
        ),
        exit_code=1,
    )  # fmt: skip
    assert found["dead_letters"] == {"unknown_profile": 1, "model_mismatch": 1}
    assert found["answered"] == 1
    assert found["failures"] == ["2 of 3 queries were dead-lettered"]


def test_a_role_that_no_policy_holds_is_refused(store: Database) -> None:
    ended = validate("--sample", "--direct", "--json", DATABASE_CONNECTION_STRING=store.admin)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "superuser" in ended.stderr
    assert ended.stderr.count("\n") == 1


# Unusable


@pytest.mark.parametrize(
    ("arguments", "lines", "says"),
    [
        ([], "", "specify either a golden set or --sample"),
        (["-", "--sample"], "", "specify either a golden set or --sample"),
        (["missing.jsonl"], "", "missing.jsonl"),
        (["-"], "", "not contain any golden queries"),
        (["-"], "{\n[]\n", "line 2: undecodable: JSON, but not an object"),
        (["-"], json.dumps({"embedding": EMBEDDING, "expected": [{"source_url": "x"}]}), "principals is required"),
        (["--sample", "--relevant-grade", "4"], "", "have no expectation with grade 4"),
        (["--sample", "--min-ndcg", "2"], "", "--min-ndcg"),
        (["--sample", "--direct"], "", "DATABASE_CONNECTION_STRING is not set"),
    ],
)  # fmt: skip
def test_what_is_unusable_ends_with_2(arguments: list[str], lines: str, says: str) -> None:
    ended = validate(*arguments, lines=lines)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_file_in_another_encoding_is_unusable(tmp_path: Path) -> None:
    golden = tmp_path / "golden.jsonl"
    golden.write_bytes(b'{"text": "\xe4"}')
    ended = validate(str(golden))
    assert ended.returncode == 2
    assert "UTF-8" in ended.stderr


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(store: Database, tmp_path: Path) -> None:
    ended = validate(
        "--sample", "--direct", "--html", str(tmp_path / "no" / "where.html"),
        DATABASE_CONNECTION_STRING=store.worker,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "where.html: No such file or directory" in ended.stderr


# Through the live pipeline


def test_the_live_pipeline_finds_what_the_store_finds(
    store: Database, channel: Channel, start_worker: StartWorker
) -> None:
    start_worker(store.worker, channel)
    live = report(validate("--sample", "--json", **through(channel)))
    direct = report(validate("--sample", "--direct", "--json", DATABASE_CONNECTION_STRING=store.worker))
    assert live["way"] == "live"
    assert live["answered"] == len(CORPUS.queries)
    assert live["vectors"] is None
    same = ("hit_rate_at_5", "ndcg_at_10", "recall_at_k", "mrr", "passages", "completeness", "warnings")
    assert {key: live[key] for key in same} == {key: direct[key] for key in same}
    assert live["latency_ms"]["p50"] > live["query_time_ms"]["p50"] > 0

    # Everything that is on the topics by now is an earlier run's; bad events stand between good ones.
    lines = list(sample_lines(CORPUS))[:6]
    broken = json.loads(lines[3]) | {"id": "broken", "profile": "nix"}
    again = report(
        validate(
            "-",
            "--json",
            "--in-flight",
            "4",
            lines="\n".join([*lines, json.dumps(broken)]),
            **through(channel),
        ),
        exit_code=1,
    )
    assert again["dead_letters"] == {"unknown_profile": 1}
    first = [each["ndcg_at_10"] for each in live["per_query"][:6]]
    assert [each["ndcg_at_10"] for each in again["per_query"]] == [*first, 0]
    assert again["per_query"][-1]["trouble"].startswith("dead letter unknown_profile: ")


def test_without_a_worker_the_queries_are_unanswered_and_not_all_waited_for(channel: Channel) -> None:
    found = report(validate("--sample", "--json", "--timeout", "0.5", **through(channel)), exit_code=1)
    assert found["unanswered"] == len(CORPUS.queries)
    assert found["latency_ms"] is None
    assert found["completeness"] == dict.fromkeys(["title", "source_url", "page", "section"])
    troubles = [each["trouble"] for each in found["per_query"]]
    assert troubles[0] == "no answer within 0.5 s"
    assert troubles[-1].startswith("not run")


def test_a_missing_topic_is_named(channel: Channel) -> None:
    ended = validate("--sample", **{**through(channel), "ANABRANCH_INPUT_TOPIC": f"{channel.name}.nix"})
    assert ended.returncode == 1
    assert f"missing topic: {channel.name}.nix" in ended.stderr


def test_a_broker_that_is_not_there_is_an_error_of_one_line() -> None:
    ended = validate("--sample", KAFKA_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("anabranch validate: Kafka at 127.0.0.1:1: ")
    assert ended.stderr.count("\n") == 1
