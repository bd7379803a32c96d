"""What is scraped: names, labels, and boundaries on the limits that are promised."""

from prometheus_client.parser import text_string_to_metric_families

from streams.telemetry.metrics import CONTENT_TYPE, Metrics
from tests.metric_names import metric_names

# Section 7 of the specification: name → kind and labels.
SPECIFIED = {
    "anabranch_events_total": ("counter", {"outcome"}),
    "anabranch_event_duration_seconds": ("histogram", {"profile"}),
    "anabranch_event_age_seconds": ("histogram", set()),
    "anabranch_stage_duration_seconds": ("histogram", {"stage"}),
    "anabranch_search_duration_seconds": ("histogram", {"scope"}),
    "anabranch_passages_returned": ("histogram", {"profile"}),
    "anabranch_tokens_used": ("histogram", {"profile"}),
    "anabranch_dead_letters_total": ("counter", {"code"}),
    "anabranch_retries_total": ("counter", {"cause"}),
    "anabranch_in_flight_events": ("gauge", set()),
    "anabranch_pool_connections": ("gauge", {"state"}),
    "anabranch_consumer_lag": ("gauge", {"partition"}),
    "anabranch_store_replication_lag_seconds": ("gauge", set()),
    "anabranch_build_info": ("gauge", {"version"}),
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
    text = metrics.exposition().decode()
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
    names = {name: set(labels) for name, labels in metric_names().items() if not name.endswith("_created")}
    assert names == expected


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
    metrics = Metrics()
    assert labelled("anabranch_events_total", "outcome", metrics) == {"answered", "dead_lettered", "skipped"}
    assert labelled("anabranch_stage_duration_seconds_count", "stage", metrics) == {
        "decode",
        "search",
        "assemble",
        "encode",
        "publish",
    }
    assert labelled("anabranch_search_duration_seconds_count", "scope", metrics) == {"local", "global"}
    # Every code that a dead letter or a retry may have, and no other: labels are bounded.
    assert labelled("anabranch_dead_letters_total", "code", metrics) == DEAD_LETTERS
    assert labelled("anabranch_retries_total", "cause", metrics) == RETRIES


def test_what_is_read_at_the_scrape_is_read_each_time() -> None:
    idle, behind = [3], [7]
    metrics = Metrics(pool=lambda: [("idle", idle[0]), ("busy", 1)], lag=lambda: [(4, behind[0])])
    pool = ("anabranch_pool_connections", frozenset({("state", "idle")}))
    lag = ("anabranch_consumer_lag", frozenset({("partition", "4")}))
    assert (samples(metrics)[pool], samples(metrics)[lag]) == (3, 7)
    idle[0], behind[0] = 2, 0
    assert (samples(metrics)[pool], samples(metrics)[lag]) == (2, 0)


def test_two_workers_in_one_process_do_not_share_a_registry() -> None:
    one, other = Metrics(), Metrics()
    one.events.labels("answered").inc()
    key = ("anabranch_events_total", frozenset({("outcome", "answered")}))
    assert (samples(one)[key], samples(other)[key]) == (1, 0)


def test_every_metric_says_what_it_is() -> None:
    text = Metrics().exposition().decode()
    families = list(text_string_to_metric_families(text))
    assert all(
        family.documentation.endswith(".") for family in families if not family.name.endswith("_created")
    )
    assert CONTENT_TYPE.startswith("text/plain")
