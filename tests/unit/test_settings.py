"""The environment: what it means, what stops the start, and what never gets into a message."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from streams.configured import result_contract
from streams.settings import (
    EmbeddingSettings,
    IngestionSettings,
    Settings,
    SettingsError,
    _FromMapping,
    environment_names,
    load,
    load_all,
    load_embedder,
    load_embedding,
    load_ingestion,
    misspelt_names,
    secret_names,
)

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
    "ANABRANCH_EMBEDDING_DIMENSIONS": 768,
    "ANABRANCH_PRINCIPALS_SETTING": "anabranch.principals",
    "ANABRANCH_SCHEMA_PATH": None,
    "ANABRANCH_RESULT_CONTRACT": "1.0.0",
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


def test_dimensions_that_1_0_0_cannot_express_require_a_newer_result_contract() -> None:
    newer, other = {"ANABRANCH_RESULT_CONTRACT": "1.1.0"}, {"ANABRANCH_EMBEDDING_DIMENSIONS": "1024"}
    assert result_contract(load({})) == "1.0.0"
    assert result_contract(load(newer)) == result_contract(load(newer | other)) == "1.1.0"
    with pytest.raises(SettingsError) as caught:
        result_contract(load(other))
    assert str(caught.value) == (
        "ANABRANCH_RESULT_CONTRACT=1.0.0 cannot express results for 1024 dimensions: upgrade all consumers of the"
        " results, then set it to 1.1.0"
    )
    assert "ANABRANCH_RESULT_CONTRACT" in error_of({"ANABRANCH_RESULT_CONTRACT": "1.2.0"})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load({}).anabranch_concurrency = 2


@pytest.mark.parametrize("name", ["ANABRANCH_CONCURENCY", "ANABRANCH_CONCURRENCY_FILE"])
def test_an_unknown_name_stops_the_start(name: str) -> None:
    assert error_of({name: SECRET}).startswith(
        f"unknown setting {name} (did you mean ANABRANCH_CONCURRENCY?); "
    )


def test_all_unknown_names_are_reported_at_once() -> None:
    assert error_of({"ANABRANCH_B": "1", "ANABRANCH_": ""}) == (
        "unknown settings ANABRANCH_, ANABRANCH_B; rename or unset them"
    )


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
    assert error_of(environment).startswith(f"unknown setting {next(iter(environment))}")


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
        ("ANABRANCH_EMBEDDING_DIMENSIONS", "0"),
        ("ANABRANCH_EMBEDDING_DIMENSIONS", "4001"),  # pgvector indexes no more
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


@pytest.mark.parametrize("port", ["0", "65536", "99999", "99999,5432", "5432,65536"])
def test_a_port_that_does_not_exist_stops_the_start(port: str) -> None:
    hosts = ",".join(f"h:{each}" for each in port.split(","))
    for dsn in (
        f"postgresql://u:{SECRET}@{hosts}/d",
        f"postgresql://{hosts}",
        f"postgresql:///d?port={port}",
    ):
        for name in ("DATABASE_CONNECTION_STRING", "DATABASE_ADMIN_CONNECTION_STRING"):
            assert error_of({name: dsn}) == f"{name}: the port must be between 1 and 65535"
        with pytest.raises(SettingsError, match=r"^DATABASE_INGESTION_CONNECTION_STRING: the port must"):
            load_ingestion({"DATABASE_INGESTION_CONNECTION_STRING": dsn})


def test_a_port_is_not_looked_for_in_the_password() -> None:
    for dsn in (
        "postgresql://u:99999@h/d",
        "postgresql://u:99999@h:5432/d",
        "postgresql://[::1]:5432",
        "postgresql://[x",
    ):
        assert load({"DATABASE_CONNECTION_STRING": dsn}).store_dsn == dsn


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ("kafka://broker:9092", "must be host:port, comma-separated, without a scheme such as kafka://"),
        ("a:9092,SASL_SSL://b:9093", "must be host:port, comma-separated, without a scheme such as kafka://"),
        ("broker:99999", "the port must be between 1 and 65535"),
        ("a:9092,b:0", "the port must be between 1 and 65535"),
        ("broker:port", "must be host:port, comma-separated"),
        ("a:9092 b:9092", "must be host:port, comma-separated"),
        ("a:1:2", "must be host:port, comma-separated"),
        ("broker/9092", "must be host:port, comma-separated"),
        (f"user:{SECRET}@broker:9092", "must be host:port, comma-separated"),
        (",", "must be host:port, comma-separated"),
    ],
)
def test_a_broker_s_address_is_checked(servers: str, says: str) -> None:
    assert error_of({"KAFKA_BOOTSTRAP_SERVERS": servers}) == f"KAFKA_BOOTSTRAP_SERVERS: {says}"


@pytest.mark.parametrize(
    "servers", ["broker", "a:9092, b:9092,", "10.0.0.1:9092", "[::1]:9092", "::1", "a_b.c-d:65535"]
)
def test_a_broker_s_address_is_passed_through(servers: str) -> None:
    assert load({"KAFKA_BOOTSTRAP_SERVERS": servers}).kafka_bootstrap_servers == servers


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
    assert message == "KAFKA_SASL_PASSWORD_FILE cannot be read: No such file or directory"
    binary = tmp_path / "binary"
    binary.write_bytes(SECRET.encode() + b"\xff\xfe")
    assert error_of({"KAFKA_SASL_PASSWORD_FILE": str(binary)}) == "KAFKA_SASL_PASSWORD_FILE is not UTF-8 text"


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


# Names that resemble settings, beside other software's with the same prefixes


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KAFKA_BOOTSTRAP_SERVER", "KAFKA_BOOTSTRAP_SERVERS"),
        ("KAFKA_BOOSTRAP_SERVERS", "KAFKA_BOOTSTRAP_SERVERS"),
        ("KAFKA_SASL_PASSWROD", "KAFKA_SASL_PASSWORD"),
        ("KAFKA_SASL_PASSWORDFILE", "KAFKA_SASL_PASSWORD_FILE"),
        ("KAFKA_SASL_MECHANISMS", "KAFKA_SASL_MECHANISM"),
        ("KAFKA_SSL_CA_FILE", "KAFKA_SSL_CAFILE"),
        ("KAFKA_SECURITY_PROTOKOL", "KAFKA_SECURITY_PROTOCOL"),
        ("DATABASE_CONECTION_STRING", "DATABASE_CONNECTION_STRING"),
        ("DATABASE_CONNECTION_STRINGS", "DATABASE_CONNECTION_STRING"),
        ("DATABASE_ADMIN_CONNECTION_STRNG", "DATABASE_ADMIN_CONNECTION_STRING"),
    ],
)
def test_a_misspelt_name_with_a_shared_prefix_is_found(name: str, meant: str) -> None:
    assert misspelt_names({name: SECRET}) == {name: meant}
    assert misspelt_names({name: SECRET, meant: "set"}) == {}  # another program's, then
    assert misspelt_names({name: ""}) == {}
    load({name: SECRET})


@pytest.mark.parametrize(
    "name",
    [
        *("KAFKA_HEAP_OPTS", "KAFKA_BROKER_ID", "KAFKA_BROKERS", "KAFKA_ADVERTISED_LISTENERS", "KAFKA_OPTS"),
        *("KAFKA_SSL_KEYSTORE_PASSWORD", "KAFKA_SSL_TRUSTSTORE_PASSWORD", "KAFKA_SSL_KEYSTORE_LOCATION"),
        *("KAFKA_SSL_KEY_CREDENTIALS", "KAFKA_SASL_JAAS_CONFIG", "KAFKA_SASL_ENABLED_MECHANISMS"),
        *("KAFKA_SECURITY_INTER_BROKER_PROTOCOL", "KAFKA_INTER_BROKER_LISTENER_NAME", "KAFKA_CLIENT_ID"),
        *(
            "DATABASE_URL",
            "DATABASE_HOST",
            "DATABASE_PASSWORD",
            "DATABASE_CONNECTION",
            "SCHEMA_REGISTRY_HOST_NAME",
        ),
        *("kafka_bootstrap_server", "PATH"),
    ],
)
def test_other_software_s_names_are_not_taken_for_misspelt(name: str) -> None:
    assert misspelt_names({name: SECRET}) == {}


# The embedding stage's own


LOCAL = {
    "ANABRANCH_EMBEDDING_PROVIDER": "local",
    "ANABRANCH_EMBEDDING_MODEL": "all-mpnet-base-v2",
    "ANABRANCH_EMBEDDING_PATH": "/model",
}
COHERE = {
    "ANABRANCH_EMBEDDING_PROVIDER": "cohere",
    "ANABRANCH_EMBEDDING_MODEL": "embed-v4.0",
    "ANABRANCH_EMBEDDING_API_KEY": SECRET,
}
GEMINI = COHERE | {
    "ANABRANCH_EMBEDDING_SUMMARIZER": "gemini",
    "ANABRANCH_EMBEDDING_SUMMARIZER_MODEL": "gemini-flash",
    "ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY": SECRET,
}


def embedding_error_of(environment: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_embedding(environment)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_stage_s_defaults_are_the_specifications() -> None:
    settings = load_embedding(LOCAL)
    assert settings.anabranch_embedding_timeout_seconds == 30
    assert settings.anabranch_embedding_dimensions == 768
    assert settings.anabranch_embedding_summarizer == "none"
    assert settings.anabranch_embedding_calls_per_minute is None
    assert settings.anabranch_embedding_batch_wait_seconds <= 0.01


@pytest.mark.parametrize("environment", [LOCAL, COHERE, GEMINI], ids=["local", "cohere", "gemini"])
def test_a_complete_environment_needs_all_it_has(environment: dict[str, str]) -> None:
    load_embedding(environment)
    for name in environment.keys() - {"ANABRANCH_EMBEDDING_SUMMARIZER"}:
        message = embedding_error_of({key: value for key, value in environment.items() if key != name})
        assert message == f"{name} must be set"


def test_all_that_is_missing_is_reported_at_once() -> None:
    assert embedding_error_of({}) == ("ANABRANCH_EMBEDDING_PROVIDER, ANABRANCH_EMBEDDING_MODEL must be set")


def test_a_server_with_openai_s_api_needs_no_key() -> None:
    load_embedding({"ANABRANCH_EMBEDDING_PROVIDER": "openai", "ANABRANCH_EMBEDDING_MODEL": "m"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ANABRANCH_EMBEDDING_PROVIDER", "acme"),
        ("ANABRANCH_EMBEDDING_DIMENSIONS", "0"),
        ("ANABRANCH_EMBEDDING_POOLING", "max"),
        ("ANABRANCH_EMBEDDING_MAX_TOKENS", "1"),
        ("ANABRANCH_EMBEDDING_BATCH_SIZE", "97"),
        ("ANABRANCH_EMBEDDING_BATCH_WAIT_SECONDS", "-1"),
        ("ANABRANCH_EMBEDDING_CALLS_PER_MINUTE", "0"),
        ("ANABRANCH_EMBEDDING_CALLS_PER_MINUTE", "nan"),
        ("ANABRANCH_EMBEDDING_TIMEOUT_SECONDS", "inf"),
        ("ANABRANCH_EMBEDDING_SUMMARIZER", "acme"),
        ("ANABRANCH_EMBEDDING_SUMMARIZER_TIMEOUT_SECONDS", "0"),
    ],
)
def test_the_stage_s_values_have_domains(name: str, value: str) -> None:
    assert embedding_error_of(LOCAL | {name: value}).startswith(f"{name}: ")


def test_every_class_of_settings_is_known_to_all_commands() -> None:
    assert {type(each) for each in load_all({})} == {*_FromMapping.__subclasses__()}


def test_all_commands_can_share_an_environment() -> None:
    environment = LOCAL | {
        "ANABRANCH_CONCURRENCY": "2",
        "ANABRANCH_TEXT_TOPIC": "texts",
        "ANABRANCH_EMBEDDING_API_KEY_FILE": "",
        "DATABASE_INGESTION_CONNECTION_STRING": DSN,
    }
    for each in (load, load_embedder, load_embedding, load_ingestion):
        each(environment)
        with pytest.raises(SettingsError) as caught:
            each(environment | {"ANABRANCH_EMBEDDING_KEY": SECRET})
        assert str(caught.value) == (
            "unknown setting ANABRANCH_EMBEDDING_KEY (did you mean ANABRANCH_EMBEDDING_API_KEY?); rename or unset it"
        )


def test_the_stage_s_keys_are_secrets(tmp_path: Path) -> None:
    secrets = secret_names(EmbeddingSettings)
    assert secrets == {"ANABRANCH_EMBEDDING_API_KEY", "ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY"}
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n", encoding="utf-8")
    settings = load_embedding(LOCAL | {f"{name}_FILE": str(file) for name in secrets})
    for name in secrets:
        assert getattr(settings, name.lower()).get_secret_value() == SECRET
    assert SECRET not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


def test_the_embedder_stands_before_the_workers() -> None:
    settings, own = load_embedder(LOCAL | {"ANABRANCH_TEXT_TOPIC": "texts", "ANABRANCH_CONCURRENCY": "3"})
    assert settings.anabranch_input_topic == "texts"
    assert settings.anabranch_output_topic == "retrieval.query-embeddings.v1"
    assert settings.anabranch_dead_letter_topic == "retrieval.query-text-dead-letters.v1"
    assert settings.anabranch_consumer_group == "anabranch-embedder"
    assert settings.anabranch_concurrency == 3
    assert own.anabranch_provider_outage == "block"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ANABRANCH_TEXT_TOPIC": "retrieval.results.v1"}, "ANABRANCH_TEXT_TOPIC and ANABRANCH_TEXT_DEAD"),
        ({"ANABRANCH_TEXT_DEAD_LETTER_TOPIC": "retrieval.query-texts.v1"}, "ANABRANCH_TEXT_TOPIC and"),
        ({"ANABRANCH_EMBEDDER_GROUP": "anabranch"}, "ANABRANCH_EMBEDDER_GROUP must be different"),
        ({"ANABRANCH_PROVIDER_OUTAGE": "wait"}, "ANABRANCH_PROVIDER_OUTAGE: "),
        ({"ANABRANCH_TEXT_TOPIK": "texts"}, "unknown setting ANABRANCH_TEXT_TOPIK"),
    ],
)
def test_the_embedder_s_names_must_not_clash(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{message}"):
        load_embedder(LOCAL | environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"ANABRANCH_REPLY_TOPICS": "a,questions", "ANABRANCH_TEXT_TOPIC": "questions"},
        {"ANABRANCH_REPLY_TOPICS": "dead", "ANABRANCH_TEXT_DEAD_LETTER_TOPIC": "dead"},
        {"ANABRANCH_REPLY_TOPICS": "retrieval.query-texts.v1"},
        {"ANABRANCH_REPLY_TOPICS": "retrieval.query-text-dead-letters.v1", "ANABRANCH_TEXT_TOPIC": ""},
    ],
)
def test_a_worker_does_not_reply_to_the_topics_of_texts(environment: dict[str, str]) -> None:
    message = (
        "ANABRANCH_REPLY_TOPICS must not contain ANABRANCH_TEXT_TOPIC or ANABRANCH_TEXT_DEAD_LETTER_TOPIC"
    )
    assert error_of(environment) == message
    with pytest.raises(SettingsError, match=f"^{message}$"):
        load_embedder(environment)


@pytest.mark.parametrize("name", ["INPUT", "OUTPUT", "DEAD_LETTER"])
def test_a_worker_does_not_reply_to_its_own_topics(name: str) -> None:
    default = load({}).model_dump()[f"anabranch_{name.lower()}_topic"]
    for environment in (
        {"ANABRANCH_REPLY_TOPICS": f"a,{default}"},
        {"ANABRANCH_REPLY_TOPICS": "own", f"ANABRANCH_{name}_TOPIC": "own"},
    ):
        assert error_of(environment).startswith("ANABRANCH_REPLY_TOPICS must not contain")


def test_a_worker_does_not_need_valid_settings_of_the_embedder() -> None:
    environment = {"ANABRANCH_TEXT_TOPIC": "not a name", "ANABRANCH_PROVIDER_OUTAGE": "unknown"}
    assert load(environment) == load({})


# Ingestion's own


def test_ingestion_reads_its_own_names_beside_all_others(tmp_path: Path) -> None:
    settings = load_ingestion(
        COHERE | {"ANABRANCH_CONCURRENCY": "2", "DATABASE_CONNECTION_STRING": "another"}
    )
    assert settings.anabranch_embedding_provider == "cohere"
    with pytest.raises(SettingsError, match=r"^DATABASE_INGESTION_CONNECTION_STRING is not set"):
        _ = settings.dsn
    assert secret_names(IngestionSettings) == {"DATABASE_INGESTION_CONNECTION_STRING"}
    file = tmp_path / "dsn"
    file.write_text(f"{DSN}\n", encoding="utf-8")
    settings = load_ingestion({"DATABASE_INGESTION_CONNECTION_STRING_FILE": str(file)})
    assert settings.dsn == DSN
    assert SECRET not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
