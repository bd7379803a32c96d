"""The environment: what it means, what stops the start, and what never gets into a message."""

import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from streams.settings import Settings, SettingsError, environment_names, load, secret_names

PAGE = Path(__file__).resolve().parents[2] / "docs/settings.md"
SECRET = "canary-5e0f"
DSN = f"postgresql://worker:{SECRET}@db.example.org:5432/retrieval"

# Section 10 of the specification.
SPECIFIED: dict[str, Any] = {
    "KAFKA_BOOTSTRAP_SERVERS": "localhost:9092",
    "KAFKA_SECURITY_PROTOCOL": "PLAINTEXT",
    "SCHEMA_REGISTRY_URL": None,
    "DATABASE_CONNECTION_STRING": None,
    "DATABASE_ADMIN_CONNECTION_STRING": None,
    "ANABRANCH_INPUT_TOPIC": "retrieval.query-embeddings.v1",
    "ANABRANCH_OUTPUT_TOPIC": "retrieval.results.v1",
    "ANABRANCH_DEAD_LETTER_TOPIC": "retrieval.dead-letters.v1",
    "ANABRANCH_CONSUMER_GROUP": "anabranch",
    "ANABRANCH_CONCURRENCY": 8,
    "ANABRANCH_POOL_SIZE": None,
    "ANABRANCH_WEB_PORT": 6066,
    "ANABRANCH_DEFAULT_PROFILE": "extraction",
    "ANABRANCH_PROFILES_FILE": None,
    "ANABRANCH_SEARCH_TIMEOUT_SECONDS": 10,
    "ANABRANCH_EXACT_SCAN_ROWS": 20_000,
    "ANABRANCH_LIVE_RECALL_SHARE": 0.01,
    "ANABRANCH_EMBEDDING_MODEL": None,
    "ANABRANCH_PRINCIPALS_SETTING": "anabranch.principals",
    "ANABRANCH_SCHEMA_PATH": None,
    "ANABRANCH_STORE_OUTAGE": "block",
    "ANABRANCH_RETRY_ATTEMPTS": 3,
    "ANABRANCH_RETRY_BASE_SECONDS": 1,
    "ANABRANCH_RETRY_MAX_SECONDS": 10,
    "ANABRANCH_GRACE_PERIOD_SECONDS": 25,
    "ANABRANCH_SESSION_TIMEOUT_SECONDS": 10,  # section 5
    "ANABRANCH_LOG_FORMAT": "json",
}


def error_of(environment: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load(environment)
    message = str(caught.value)
    assert "\n" not in message
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    return message


def test_the_pool_has_two_connections_for_each_event_and_one_more_unless_set() -> None:
    assert load({}).pool_size == 17
    assert load({"ANABRANCH_CONCURRENCY": "3"}).pool_size == 7
    assert load({"ANABRANCH_CONCURRENCY": "3", "ANABRANCH_POOL_SIZE": "4"}).pool_size == 4


def test_the_defaults_are_the_specifications() -> None:
    settings = load({})
    assert {name: getattr(settings, name.lower()) for name in SPECIFIED} == SPECIFIED


def test_the_process_s_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CONCURRENCY", "3")
    monkeypatch.setenv("anabranch_concurrency", "4")  # names are exact
    assert load().anabranch_concurrency == 3


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load({}).anabranch_concurrency = 2


@pytest.mark.parametrize("name", ["ANABRANCH_CONCURENCY", "ANABRANCH_", "ANABRANCH_CONCURRENCY_FILE"])
def test_an_unknown_name_stops_the_start(name: str) -> None:
    assert error_of({name: SECRET}) == f"unknown setting {name}"


def test_all_unknown_names_are_reported_at_once() -> None:
    assert error_of({"ANABRANCH_B": "1", "ANABRANCH_A": ""}) == "unknown setting ANABRANCH_A, ANABRANCH_B"


def test_other_peoples_names_are_none_of_our_business() -> None:
    assert load(
        {"PATH": "/bin", "KAFKA_HEAP_OPTS": "-Xmx1g", "XANABRANCH_A": "1", "anabranch_a": "1"}
    ) == load({})


def test_what_kubernetes_injects_beside_a_service_is_let_pass() -> None:
    injected = {
        "ANABRANCH_SERVICE_HOST": "10.0.0.11",
        "ANABRANCH_SERVICE_PORT": "6066",
        "ANABRANCH_SERVICE_PORT_WEB": "6066",
        "ANABRANCH_PORT": "tcp://10.0.0.11:6066",
        "ANABRANCH_PORT_6066_TCP": "tcp://10.0.0.11:6066",
        "ANABRANCH_PORT_6066_TCP_PROTO": "tcp",
        "ANABRANCH_PORT_6066_TCP_PORT": "6066",
        "ANABRANCH_PORT_6066_TCP_ADDR": "10.0.0.11",
        "ANABRANCH_PORT_53_UDP": "udp://10.0.0.11:53",
    }
    assert load(injected) == load({})


@pytest.mark.parametrize(
    "environment", [{"ANABRANCH_PORT": "8080"}, {"ANABRANCH_PORTS": "1"}, {"ANABRANCH_PORT_WEB": "6066"}]
)
def test_what_only_looks_like_it_is_not(environment: dict[str, str]) -> None:
    # Whoever means ANABRANCH_WEB_PORT must hear of it.
    assert error_of(environment) == f"unknown setting {next(iter(environment))}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ANABRANCH_STORE_OUTAGE", "panic"),
        ("ANABRANCH_LOG_FORMAT", "JSON"),
        ("KAFKA_SECURITY_PROTOCOL", "ssl"),
        ("KAFKA_SASL_MECHANISM", "GSSAPI"),
        ("ANABRANCH_CONCURRENCY", "0"),
        ("ANABRANCH_CONCURRENCY", "many"),
        ("ANABRANCH_CONCURRENCY", "1.5"),
        ("ANABRANCH_POOL_SIZE", "1"),
        ("ANABRANCH_WEB_PORT", "65536"),
        ("ANABRANCH_SEARCH_TIMEOUT_SECONDS", "0"),
        ("ANABRANCH_SEARCH_TIMEOUT_SECONDS", "nan"),
        ("ANABRANCH_RETRY_MAX_SECONDS", "inf"),
        ("ANABRANCH_RETRY_BASE_SECONDS", "nan"),
        ("ANABRANCH_GRACE_PERIOD_SECONDS", "inf"),
        ("ANABRANCH_GRACE_PERIOD_SECONDS", "-1"),
        ("ANABRANCH_EXACT_SCAN_ROWS", "-1"),
        ("ANABRANCH_LIVE_RECALL_SHARE", "-0.01"),
        ("ANABRANCH_LIVE_RECALL_SHARE", "1.01"),
        ("ANABRANCH_RETRY_ATTEMPTS", "0"),
        ("ANABRANCH_PRINCIPALS_SETTING", "principals"),  # PostgreSQL takes only qualified names
        ("ANABRANCH_PRINCIPALS_SETTING", "a.b'; DROP TABLE"),
        ("ANABRANCH_PRINCIPALS_SETTING", "a.b\n"),
        ("ANABRANCH_INPUT_TOPIC", "no spaces"),
        ("ANABRANCH_OUTPUT_TOPIC", "x" * 250),
    ],
)
def test_a_value_outside_its_domain_stops_the_start_and_is_named(name: str, value: str) -> None:
    message = error_of({name: value})
    assert message.startswith(f"{name}: ")
    if len(value) > 3:
        assert value not in message  # it may be a secret in the wrong place


def test_all_errors_are_reported_at_once() -> None:
    message = error_of({"ANABRANCH_WEB_PORT": "0", "ANABRANCH_LOG_FORMAT": "xml"})
    assert "ANABRANCH_WEB_PORT: " in message
    assert "ANABRANCH_LOG_FORMAT: " in message


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ANABRANCH_RETRY_MAX_SECONDS": "0.5"}, "ANABRANCH_RETRY_BASE_SECONDS"),
        ({"KAFKA_SECURITY_PROTOCOL": "SASL_SSL"}, "KAFKA_SASL_PASSWORD"),
        ({"KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "KAFKA_SASL_PASSWORD": SECRET}, "KAFKA_SASL_USERNAME"),
        ({"KAFKA_SSL_CAFILE": f"/{SECRET}"}, "KAFKA_SECURITY_PROTOCOL=PLAINTEXT"),
        ({"KAFKA_SSL_KEYFILE": f"/{SECRET}", "KAFKA_SECURITY_PROTOCOL": "SSL"}, "KAFKA_SSL_CERTFILE"),
        ({"SCHEMA_REGISTRY_URL": f"https://u:{SECRET}@registry"}, "SCHEMA_REGISTRY_URL"),
        ({"ANABRANCH_OUTPUT_TOPIC": "retrieval.query-embeddings.v1"}, "ANABRANCH_INPUT_TOPIC"),
        ({"ANABRANCH_DEAD_LETTER_TOPIC": "a", "ANABRANCH_INPUT_TOPIC": "a"}, "ANABRANCH_DEAD_LETTER_TOPIC"),
    ],
)
def test_settings_that_contradict_each_other_stop_the_start(environment: dict[str, str], named: str) -> None:
    assert named in error_of(environment)


def test_empty_is_unset() -> None:
    assert load(dict.fromkeys(environment_names(), "")) == load({})
    assert load({f"{name}_FILE": "" for name in secret_names()}) == load({})


def test_a_missing_connection_string_is_reported_in_one_line() -> None:
    for environment in ({}, {"DATABASE_CONNECTION_STRING": ""}):
        with pytest.raises(SettingsError, match=r"^DATABASE_CONNECTION_STRING is not set") as caught:
            _ = load(environment).store_dsn
        assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match=r"^DATABASE_ADMIN_CONNECTION_STRING is not set"):
        _ = load({"DATABASE_CONNECTION_STRING": DSN}).admin_dsn


@pytest.mark.parametrize(
    "dsn",
    ["postgresql:///db?host=/var/run/postgresql", "postgres://a,b:5433/db", "postgresql://?host=h", " x "],
)
def test_a_connection_string_is_passed_through_unparsed(dsn: str) -> None:
    settings = load({"DATABASE_CONNECTION_STRING": dsn, "DATABASE_ADMIN_CONNECTION_STRING": dsn})
    assert (settings.store_dsn, settings.admin_dsn) == (dsn, dsn)


def test_the_secrets_are_these() -> None:
    assert secret_names() == {
        "DATABASE_CONNECTION_STRING",
        "DATABASE_ADMIN_CONNECTION_STRING",
        "KAFKA_SASL_PASSWORD",
        "KAFKA_SSL_KEY_PASSWORD",
    }


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    for name in secret_names():
        file = tmp_path / name
        file.write_text(f"{DSN}\n", encoding="utf-8")  # editors end a file with a newline
        settings = load({f"{name}_FILE": str(file)})
        assert getattr(settings, name.lower()).get_secret_value() == DSN


def test_an_empty_secret_file_is_unset(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(SettingsError, match="is not set"):
        _ = load({"DATABASE_CONNECTION_STRING_FILE": str(file)}).store_dsn


def test_a_secret_in_two_places_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "dsn"
    file.write_text(DSN, encoding="utf-8")
    message = error_of({"DATABASE_CONNECTION_STRING": DSN, "DATABASE_CONNECTION_STRING_FILE": str(file)})
    assert (
        message
        == "DATABASE_CONNECTION_STRING and DATABASE_CONNECTION_STRING_FILE are both set; unset one of them"
    )


def test_a_secret_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    message = error_of({"KAFKA_SASL_PASSWORD_FILE": str(tmp_path / "absent")})
    assert message == "KAFKA_SASL_PASSWORD_FILE cannot be read: FileNotFoundError"
    binary = tmp_path / "binary"
    binary.write_bytes(SECRET.encode() + b"\xff\xfe")
    assert error_of({"KAFKA_SASL_PASSWORD_FILE": str(binary)}).endswith("UnicodeDecodeError")


def test_secrets_are_shown_nowhere() -> None:
    settings = load(
        dict.fromkeys(secret_names(), DSN)
        | {"KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "KAFKA_SASL_USERNAME": "worker"}
    )
    for shown in (
        repr(settings),
        str(settings),
        f"{settings}",
        str(settings.model_dump()),
        settings.model_dump_json(),
    ):
        assert SECRET not in shown
    assert settings.store_dsn == DSN
    assert pickle.loads(pickle.dumps(settings)) == settings


FREE_TEXT = {
    "ANABRANCH_CONSUMER_GROUP",
    "ANABRANCH_DEFAULT_PROFILE",
    "ANABRANCH_EMBEDDING_MODEL",
    "KAFKA_BOOTSTRAP_SERVERS",
    "KAFKA_SASL_USERNAME",
}


@pytest.mark.parametrize(
    "name",
    sorted(
        name for name in environment_names() if Settings.model_fields[name.lower()].annotation != Path | None
    ),
)
def test_no_value_is_quoted_in_an_error(name: str) -> None:
    # Also that of a secret which stands in another setting's place.
    environment = {name: f"{SECRET} \n"}
    if name in secret_names():
        assert SECRET not in repr(load(environment))
    elif name in FREE_TEXT:
        assert SECRET in getattr(load(environment), name.lower())
    else:
        assert name in error_of(environment)


def test_only_what_load_hands_over_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("ANABRANCH_CONCURRENCY=9\n", encoding="utf-8")
    monkeypatch.setenv("ANABRANCH_CONCURRENCY", "7")
    assert load({}).anabranch_concurrency == 8
    assert Settings().anabranch_concurrency == 8


def test_every_setting_is_in_the_table_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)`", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted(environment_names())
