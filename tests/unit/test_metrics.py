"""What is scraped: names, labels, and boundaries on the limits that are promised."""

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from streams.core.live_recall import NotMeasured
from streams.core.replies import REPLY_WARNINGS
from streams.core.warning_codes import WarningCode
from streams.telemetry.metrics import CONTENT_TYPE, OPENMETRICS_CONTENT_TYPE, Metrics, WorkerState
from tests.metric_names import metric_names

# Section 7 of the specification, and what operators need beyond it: name → kind and labels.
SPECIFIED = {
    "anabranch_events_received_total": ("counter", set()),
    "anabranch_events_total": ("counter", {"outcome"}),
    "anabranch_event_duration_seconds": ("histogram", {"profile"}),
    "anabranch_event_age_seconds": ("histogram", set()),
    "anabranch_stage_duration_seconds": ("histogram", {"stage"}),
    "anabranch_search_duration_seconds": ("histogram", {"scope"}),
    "anabranch_passages_returned": ("histogram", {"profile"}),
    "anabranch_tokens_used": ("histogram", {"profile"}),
    "anabranch_dead_letters_total": ("counter", {"code"}),
    "anabranch_placeholder_dead_letters_total": ("counter", set()),
    "anabranch_expired_on_arrival_total": ("counter", set()),
    "anabranch_replies_total": ("counter", {"outcome"}),
    "anabranch_warnings_total": ("counter", {"code"}),
    "anabranch_retries_total": ("counter", {"cause"}),
    "anabranch_live_recall_total": ("counter", {"size"}),
    "anabranch_live_recall_sum": ("gauge", {"size"}),
    "anabranch_live_recall_squares_sum": ("gauge", {"size"}),
    "anabranch_live_recall_skipped_total": ("counter", {"reason"}),
    "anabranch_live_recall_seconds_total": ("counter", set()),
    "anabranch_in_flight_events": ("gauge", set()),
    "anabranch_pool_connections": ("gauge", {"state"}),
    "anabranch_pool_connections_max": ("gauge", set()),
    "anabranch_consumer_lag": ("gauge", {"partition"}),
    "anabranch_committed_offset": ("gauge", {"partition"}),
    "anabranch_oldest_waiting_seconds": ("gauge", {"partition"}),
    "anabranch_ready": ("gauge", set()),
    "anabranch_store_up": ("gauge", set()),
    "anabranch_provider_up": ("gauge", set()),  # an embedding stage's, as the next one
    "anabranch_embedding_duration_seconds": ("histogram", set()),
    "anabranch_kafka_up": ("gauge", set()),
    "anabranch_assigned_partitions": ("gauge", set()),
    "anabranch_event_loop_delay_seconds": ("histogram", set()),
    "anabranch_store_replication_lag_seconds": ("gauge", set()),
    "anabranch_build_info": ("gauge", {"version"}),
    "process_cpu_seconds_total": ("counter", set()),
    "process_resident_memory_bytes": ("gauge", set()),
    "process_virtual_memory_bytes": ("gauge", set()),
    "process_start_time_seconds": ("gauge", set()),
    "process_open_fds": ("gauge", set()),
    "process_max_fds": ("gauge", set()),
    "python_gc_collections_total": ("counter", {"generation"}),
    "python_gc_objects_collected_total": ("counter", {"generation"}),
    "python_gc_objects_uncollectable_total": ("counter", {"generation"}),
}

# Section 6.
DEAD_LETTERS = {
    "undecodable",
    "unknown_schema",
    "unsupported_version",
    "contract_violation",
    "dimension_mismatch",
    "non_finite_embedding",
    "zero_embedding",
    "topic_without_session",
    "unknown_profile",
    "model_mismatch",
    "expired",
    "result_too_large",
    "unreadable_batch",
    "record_too_large",
    "store_unavailable",
    "search_timeout",
    "internal_error",
}
RETRIES = {
    "store_unavailable",
    "search_timeout",
    "store_misconfigured",
    "internal_error",
    "kafka_unavailable",
    "commit_failed",
}


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.exposition()[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(name: str, label: str, metrics: Metrics) -> set[str]:
    return {dict(labels)[label] for sample, labels in samples(metrics) if sample == name}


def test_the_names_and_labels_are_the_specifications() -> None:
    expected: dict[str, set[str]] = {}
    for name, (kind, labels) in SPECIFIED.items():
        if kind == "histogram":
            expected |= {f"{name}_bucket": labels | {"le"}, f"{name}_count": labels, f"{name}_sum": labels}
        else:
            expected[name] = labels
    assert {name: set(labels) for name, labels in metric_names().items()} == expected


def test_the_limits_of_the_objectives_are_boundaries() -> None:
    metrics = Metrics()
    metrics.event_duration.labels("docs").observe(0.25)
    metrics.event_age.observe(2.0)
    found = samples(metrics)
    # A limit counts as kept when it is just reached, and what is beyond it does not.
    within = frozenset({("profile", "docs"), ("le", "0.25")})
    assert found["anabranch_event_duration_seconds_bucket", within] == 1
    assert found["anabranch_event_age_seconds_bucket", frozenset({("le", "2.0")})] == 1
    metrics.event_duration.labels("docs").observe(0.2500001)
    metrics.event_age.observe(2.0000001)
    found = samples(metrics)
    assert found["anabranch_event_duration_seconds_bucket", within] == 1
    assert found["anabranch_event_age_seconds_bucket", frozenset({("le", "2.0")})] == 1


def test_the_shipped_ranges_and_budgets_are_boundaries_too() -> None:
    metrics = Metrics()
    metrics.passages_returned.labels("docs")
    metrics.tokens_used.labels("docs")
    assert {"0.0", "5.0", "9.0", "15.0"} <= labelled("anabranch_passages_returned_bucket", "le", metrics)
    assert {"0.0", "3500.0"} <= labelled("anabranch_tokens_used_bucket", "le", metrics)


def test_series_of_known_labels_exist_before_their_first_event() -> None:
    metrics = Metrics(profiles=["docs", "an operator's"])
    for histogram in ("event_duration_seconds", "passages_returned", "tokens_used"):
        profiles = labelled(f"anabranch_{histogram}_count", "profile", metrics)
        assert profiles == {"docs", "an operator's"}
    assert labelled("anabranch_warnings_total", "code", metrics) == {*WarningCode, "other"}
    assert labelled("anabranch_events_total", "outcome", metrics) == {"answered", "dead_lettered", "skipped"}
    assert labelled("anabranch_stage_duration_seconds_count", "stage", metrics) == {
        "decode",
        "search",
        "assemble",
        "encode",
        "publish",
    }
    assert labelled("anabranch_search_duration_seconds_count", "scope", metrics) == {"local", "global"}
    for name in ("total", "sum", "squares_sum"):
        assert labelled(f"anabranch_live_recall_{name}", "size", metrics) == {"normal", "large"}
    assert labelled("anabranch_live_recall_skipped_total", "reason", metrics) == set(NotMeasured)
    # Every code that a dead letter or a retry may have, and no other: labels are bounded.
    assert labelled("anabranch_dead_letters_total", "code", metrics) == DEAD_LETTERS
    assert labelled("anabranch_retries_total", "cause", metrics) == RETRIES
    outcomes = {"answered", "dead_lettered", *REPLY_WARNINGS}
    assert labelled("anabranch_replies_total", "outcome", metrics) == outcomes
    assert {code for code in WarningCode if code.startswith("reply_")} == {*REPLY_WARNINGS}


def test_what_is_read_at_the_scrape_is_read_each_time() -> None:
    idle, behind = [3], [7]
    metrics = Metrics(pool=lambda: [("idle", idle[0]), ("busy", 1)], lag=lambda: [(4, behind[0])])
    pool = ("anabranch_pool_connections", frozenset({("state", "idle")}))
    lag = ("anabranch_consumer_lag", frozenset({("partition", "4")}))
    assert (samples(metrics)[pool], samples(metrics)[lag]) == (3, 7)
    idle[0], behind[0] = 2, 0
    assert (samples(metrics)[pool], samples(metrics)[lag]) == (2, 0)


def test_the_worker_s_state_is_read_at_the_scrape() -> None:
    state = WorkerState()
    metrics = Metrics(worker=lambda: state, pool_max=17)

    def shown() -> list[float]:
        names = ("ready", "store_up", "kafka_up", "assigned_partitions", "pool_connections_max")
        return [samples(metrics)[f"anabranch_{name}", frozenset()] for name in names]

    assert shown() == [0, 0, 0, 0, 17]
    state = WorkerState(ready=True, dependency_up=True, kafka_up=True, assigned_partitions=3)
    assert shown() == [1, 1, 1, 3, 17]


# What Prometheus 2 and 3 send by default, and 3 if told to prefer the text format.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PREFERS_TEXT = "text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.4,*/*;q=0.3"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (PROMETHEUS_2, OPENMETRICS_CONTENT_TYPE),
        (PROMETHEUS_3, OPENMETRICS_CONTENT_TYPE),
        ("application/openmetrics-text", OPENMETRICS_CONTENT_TYPE),
        ("Application/OpenMetrics-Text; version=1.0.0; q=0.9 , text/plain;q=0.1", OPENMETRICS_CONTENT_TYPE),
        (PREFERS_TEXT, CONTENT_TYPE),
        ("", CONTENT_TYPE),
        ("*/*", CONTENT_TYPE),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", CONTENT_TYPE),
        ("application/openmetrics-text;q=0", CONTENT_TYPE),
        ("application/openmetrics-text;q=none", CONTENT_TYPE),
        (";;,=,q=", CONTENT_TYPE),
    ],
)
def test_the_format_is_the_one_that_the_client_prefers(accept: str, content_type: str) -> None:
    content, found = Metrics().exposition(accept)
    assert found == content_type
    assert content.endswith(b"# EOF\n") is (content_type == OPENMETRICS_CONTENT_TYPE)


def test_both_formats_have_the_same_samples_and_none_is_a_creation_time() -> None:
    metrics = Metrics(
        profiles=["docs"],
        lag=lambda: [(0, 1)],
        committed=lambda: [(0, 7)],
        oldest_waiting=lambda: [(0, 1.5)],
    )
    metrics.events.labels("answered").inc()
    metrics.event_duration.labels("docs").observe(0.3)
    content, _ = metrics.exposition("application/openmetrics-text")
    families = list(openmetrics_families(content.decode()))  # type: ignore[no-untyped-call]  # as published
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    text = samples(metrics)
    assert found.keys() == text.keys()
    ours = {key for key in found if key[0].startswith("anabranch_") and not math.isnan(found[key])}
    assert {key: found[key] for key in ours} == {key: text[key] for key in ours}
    assert not [name for name, _ in found if name.endswith("_created")]


def test_two_workers_in_one_process_do_not_share_a_registry() -> None:
    one, other = Metrics(), Metrics()
    one.events.labels("answered").inc()
    key = ("anabranch_events_total", frozenset({("outcome", "answered")}))
    assert (samples(one)[key], samples(other)[key]) == (1, 0)


def test_every_metric_says_what_it_is() -> None:
    families = list(text_string_to_metric_families(Metrics().exposition()[0].decode()))
    ours = [family for family in families if family.name.startswith("anabranch_")]
    assert len(ours) > 20
    assert all(family.documentation.endswith(".") for family in ours)
