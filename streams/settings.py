"""All settings, read from the environment once and immutable.

Only the composition root and the command line use this module; everything else takes explicit arguments. Secrets may
also be in a file named by ``<NAME>_FILE``. Error messages never quote values, because they may be secrets.
"""

import os
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

__all__ = [
    "EmbedderSettings",
    "EmbeddingSettings",
    "IngestionSettings",
    "Settings",
    "SettingsError",
    "environment_names",
    "load",
    "load_all",
    "load_embedder",
    "load_embedding",
    "load_embedding_if_set",
    "load_ingestion",
    "misspelt_names",
    "secret_names",
]

SettingName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+$")]
TopicName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
TopicNames = Annotated[
    tuple[TopicName, ...],
    BeforeValidator(lambda names: names.split(",") if isinstance(names, str) else names),
]

_PREFIX: Final = "ANABRANCH_"
# How similar a name is to the setting that it is taken for. KAFKA_SSL_KEYSTORE_PASSWORD, another program's, has 0.898.
_MISSPELT: Final = 0.9

# Variables that Kubernetes injects for a Service named `anabranch`; ignored. They are recognized by name and value:
# ANABRANCH_PORT=8080 is a mistake for ANABRANCH_WEB_PORT.
_KUBERNETES_SERVICE_LINK = re.compile(
    r"ANABRANCH_(SERVICE_\w+=.*|PORT=(tcp|udp|sctp)://.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*)", re.DOTALL
)


_SERVER = re.compile(r"(?:\[[^\[\]\s]+\]|[^\[\]\s:/@]+)(?::(\d+))?")
_PORTS = re.compile(r":(\d+)(?=,|$)")
_MAX_PORT: Final = 65_535
_BAD_PORT: Final = "the port must be between 1 and 65535"


def _check_servers(servers: str) -> str:
    """Check the brokers' addresses: the client reports an invalid one with a traceback, or as unreachable."""
    if "://" in servers:
        raise ValueError("must be host:port, comma-separated, without a scheme such as kafka://")
    found = [server.strip() for server in servers.split(",") if server.strip()]
    for server in found:
        match = _SERVER.fullmatch(server)
        if match is None and not _is_ipv6(server):
            raise ValueError("must be host:port, comma-separated")
        if match is not None and match[1] is not None and not 1 <= int(match[1]) <= _MAX_PORT:
            raise ValueError(_BAD_PORT)
    if not found:
        raise ValueError("must be host:port, comma-separated")
    return servers


def _is_ipv6(server: str) -> bool:
    try:
        IPv6Address(server)
    except ValueError:
        return False
    return True


def _check_ports(connection_string: SecretStr) -> SecretStr:
    """Check the ports where asyncpg finds them: with an invalid one it uses another port, or fails with a traceback."""
    try:
        address = urlsplit(connection_string.get_secret_value())
    except ValueError:
        return connection_string  # the driver reports it
    hosts = address.netloc.partition("@")[2] if "@" in address.netloc else address.netloc
    ports = [*_PORTS.findall(hosts), *",".join(parse_qs(address.query).get("port", ())).split(",")]
    if any(port.isascii() and port.isdigit() and not 1 <= int(port) <= _MAX_PORT for port in ports):
        raise ValueError(_BAD_PORT)
    return connection_string


class SettingsError(Exception):
    """A setting is missing, unknown or invalid; the message is one line."""


#: Passed to the driver unchanged.
ConnectionString = Annotated[SecretStr, AfterValidator(_check_ports)]


class _FromMapping(BaseSettings):
    """Settings whose only source is `_load`."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the values from `load`, which has read the environment and the secret files; names are exact."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


_Kind = TypeVar("_Kind", bound=_FromMapping)


class Settings(_FromMapping):
    """The validated settings. Durations are in seconds."""

    # The store's address.
    database_connection_string: ConnectionString | None = None
    # The owner's, for `migrate` and `stats`; workers never need it.
    database_admin_connection_string: ConnectionString | None = None

    kafka_bootstrap_servers: Annotated[str, AfterValidator(_check_servers)] = "localhost:9092"
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    kafka_sasl_username: str | None = None
    kafka_sasl_password: SecretStr | None = None
    kafka_ssl_cafile: Path | None = None
    kafka_ssl_certfile: Path | None = None
    kafka_ssl_keyfile: Path | None = None
    kafka_ssl_key_password: SecretStr | None = None
    schema_registry_url: str | None = None

    anabranch_input_topic: TopicName = "retrieval.query-embeddings.v1"
    anabranch_output_topic: TopicName = "retrieval.results.v1"
    anabranch_dead_letter_topic: TopicName = "retrieval.dead-letters.v1"
    # The topics that a worker may reply to. Without this list, any sender of an event could make it write anywhere.
    anabranch_reply_topics: TopicNames = ("retrieval.replies.v1",)
    anabranch_replied_results: Literal["also_output", "reply_only"] = "also_output"
    anabranch_consumer_group: str = "anabranch"
    # Events processed concurrently per worker.
    anabranch_concurrency: int = Field(default=8, ge=1, le=1000)
    # Database connections per worker; None: two for each concurrent event, and one for the probe.
    anabranch_pool_size: int | None = Field(default=None, ge=2, le=2001)
    anabranch_web_port: int = Field(default=6066, ge=1, le=65535)
    # All addresses of the machine, as needed in a container.
    anabranch_web_bind_address: IPv4Address | IPv6Address = IPv4Address("0.0.0.0")  # noqa: S104  # probes come from outside
    anabranch_default_profile: str = "extraction"
    anabranch_profiles_file: Path | None = None
    anabranch_search_timeout_seconds: float = Field(default=10.0, gt=0, le=3600)
    # The maximum leaves room for the searches' arithmetic in 32 bits.
    anabranch_exact_scan_rows: int = Field(default=20_000, ge=0, le=100_000_000)
    # Prepared statements per connection; 0 for a pooler that does not support them.
    anabranch_statement_cache_size: int = Field(default=100, ge=0, le=10_000)
    # A replica that may be further behind its primary is not searched; 0: no replica at all.
    anabranch_max_replication_lag_seconds: float = Field(default=60.0, ge=0)
    # Exact searches that measure recall take at most this share of the searches' time; 0: none.
    anabranch_live_recall_share: float = Field(default=0.01, ge=0, le=1)
    anabranch_embedding_model: str | None = None
    # pgvector indexes up to 4,000 dimensions in half precision.
    anabranch_embedding_dimensions: int = Field(default=768, ge=1, le=4000)
    anabranch_principals_setting: SettingName = "anabranch.principals"
    anabranch_schema_path: Path | None = None
    # Minor version of the results' contract. The default is the previous one, so that consumers upgrade first.
    anabranch_result_contract: Literal["1.0.0", "1.1.0"] = "1.0.0"
    anabranch_store_outage: Literal["block", "dead_letter"] = "block"
    anabranch_retry_attempts: int = Field(default=3, ge=1)
    anabranch_retry_base_seconds: float = Field(default=1.0, gt=0)
    anabranch_retry_max_seconds: float = Field(default=10.0, gt=0)
    anabranch_grace_period_seconds: float = Field(default=25.0, ge=0)
    # The consumer group's timeouts. A rebalance waits this long for every member, so a drain must be shorter.
    anabranch_session_timeout_seconds: float = Field(default=10.0, ge=1)
    anabranch_rebalance_timeout_seconds: float = Field(default=40.0, ge=2)
    anabranch_max_poll_interval_seconds: float = Field(default=1000.0, ge=1)
    # How long a broker may delay an empty fetch response. Kafka answers as soon as there are records.
    anabranch_fetch_max_wait_seconds: float = Field(default=0.5, gt=0, le=60)
    # Maximum decompressed size of one batch; the memory for larger ones is never allocated. Waiting events use at most
    # about four times as much, plus one event per partition.
    anabranch_max_inflated_bytes: int = Field(default=8 * 1024 * 1024, ge=64 * 1024, le=64 * 1024 * 1024)
    anabranch_log_format: Literal["json", "console"] = "json"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.anabranch_retry_max_seconds < self.anabranch_retry_base_seconds:
            raise ValueError("ANABRANCH_RETRY_MAX_SECONDS must not be less than ANABRANCH_RETRY_BASE_SECONDS")
        sasl = self.kafka_security_protocol.startswith("SASL")
        if sasl and (self.kafka_sasl_username is None or self.kafka_sasl_password is None):
            raise ValueError(
                f"KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol} requires KAFKA_SASL_USERNAME"
                " and KAFKA_SASL_PASSWORD"
            )
        files = {
            "KAFKA_SSL_CAFILE": self.kafka_ssl_cafile,
            "KAFKA_SSL_CERTFILE": self.kafka_ssl_certfile,
            "KAFKA_SSL_KEYFILE": self.kafka_ssl_keyfile,
        }
        given = [name for name, path in files.items() if path is not None]
        if given and not self.kafka_security_protocol.endswith("SSL"):
            # Otherwise an operator who configures a CA would unknowingly use an unencrypted connection.
            raise ValueError(
                f"{', '.join(given)} would be ignored:"
                f" KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol} does not use TLS"
            )
        if self.kafka_ssl_keyfile is not None and self.kafka_ssl_certfile is None:
            raise ValueError("KAFKA_SSL_KEYFILE requires KAFKA_SSL_CERTFILE")
        if self.schema_registry_url is not None:
            # Otherwise only consumers would notice that the worker does not use the configured encoding.
            raise ValueError(
                "SCHEMA_REGISTRY_URL is not supported by this release; unset it to publish Avro single-object encoding"
            )
        topics = {self.anabranch_input_topic, self.anabranch_output_topic, self.anabranch_dead_letter_topic}
        if len(topics) < 3:  # noqa: PLR2004  # the number of topics
            raise ValueError(
                "ANABRANCH_INPUT_TOPIC, ANABRANCH_OUTPUT_TOPIC and ANABRANCH_DEAD_LETTER_TOPIC must be different"
            )
        if not topics.isdisjoint(self.anabranch_reply_topics):
            raise ValueError(
                "ANABRANCH_REPLY_TOPICS must not contain ANABRANCH_INPUT_TOPIC, ANABRANCH_OUTPUT_TOPIC or"
                " ANABRANCH_DEAD_LETTER_TOPIC"
            )
        return self

    @property
    def store_dsn(self) -> str:
        """The worker's connection string.

        Raises:
            SettingsError: it is not set.
        """
        return _required(self.database_connection_string, "DATABASE_CONNECTION_STRING", "the worker's role")

    @property
    def pool_size(self) -> int:
        """Maximum number of a worker's database connections."""
        # Two for each event in flight, so that no arm has to wait for one; one for the probe.
        return self.anabranch_pool_size or 2 * self.anabranch_concurrency + 1

    @property
    def admin_dsn(self) -> str:
        """The owner's connection string.

        Raises:
            SettingsError: it is not set.
        """
        return _required(
            self.database_admin_connection_string, "DATABASE_ADMIN_CONNECTION_STRING", "the owner"
        )


class EmbeddingSettings(_FromMapping):
    """The embedding stage's own settings; the worker has none of them. Durations are in seconds."""

    anabranch_embedding_provider: Literal["cohere", "openai", "local"] | None = None
    # As the provider calls it; becomes the events' `embedding_model`.
    anabranch_embedding_model: str | None = None
    anabranch_embedding_dimensions: int = Field(default=768, ge=1, le=4000)
    anabranch_embedding_api_key: SecretStr | None = None
    # None: Cohere's or OpenAI's own.
    anabranch_embedding_base_url: str | None = None
    # The folder of a local model.
    anabranch_embedding_path: Path | None = None
    anabranch_embedding_pooling: Literal["mean", "cls"] = "mean"
    # None: 256 for a local model; otherwise only what the provider rejects is truncated.
    anabranch_embedding_max_tokens: int | None = Field(default=None, ge=8)
    # The maximum is Cohere's.
    anabranch_embedding_batch_size: int = Field(default=32, ge=1, le=96)
    anabranch_embedding_batch_wait_seconds: float = Field(default=0.005, ge=0, le=1)
    anabranch_embedding_calls_per_minute: float | None = Field(default=None, gt=0)
    anabranch_embedding_timeout_seconds: float = Field(default=30.0, gt=0, le=600)
    anabranch_embedding_summarizer: Literal["none", "gemini", "openai"] = "none"
    anabranch_embedding_summarizer_model: str | None = None
    anabranch_embedding_summarizer_api_key: SecretStr | None = None
    # None: Gemini's or OpenAI's own.
    anabranch_embedding_summarizer_base_url: str | None = None
    anabranch_embedding_summarizer_timeout_seconds: float = Field(default=5.0, gt=0, le=60)

    @property
    def missing(self) -> list[str]:
        """The names of the settings that the provider and the summarizer require, and that are not set."""
        provider, summarizer = self.anabranch_embedding_provider, self.anabranch_embedding_summarizer
        needed = {
            "ANABRANCH_EMBEDDING_PROVIDER": provider is None,
            "ANABRANCH_EMBEDDING_MODEL": self.anabranch_embedding_model is None,
            "ANABRANCH_EMBEDDING_API_KEY": provider == "cohere" and self.anabranch_embedding_api_key is None,
            "ANABRANCH_EMBEDDING_PATH": provider == "local" and self.anabranch_embedding_path is None,
            "ANABRANCH_EMBEDDING_SUMMARIZER_MODEL": (
                summarizer != "none" and self.anabranch_embedding_summarizer_model is None
            ),
            "ANABRANCH_EMBEDDING_SUMMARIZER_API_KEY": (
                summarizer == "gemini" and self.anabranch_embedding_summarizer_api_key is None
            ),
        }
        return [name for name, is_missing in needed.items() if is_missing]


class EmbedderSettings(_FromMapping):
    """What `anabranch embedder` needs besides `EmbeddingSettings` and the worker's settings."""

    anabranch_text_topic: TopicName = "retrieval.query-texts.v1"
    anabranch_text_dead_letter_topic: TopicName = "retrieval.query-text-dead-letters.v1"
    anabranch_embedder_group: str = "anabranch-embedder"
    anabranch_provider_outage: Literal["block", "dead_letter"] = "block"


class IngestionSettings(_FromMapping):
    """What `anabranch ingest` needs besides `EmbeddingSettings`, which it reads if a provider is set."""

    # A member of anabranch_writer: another role than the workers', which must not be able to write.
    database_ingestion_connection_string: ConnectionString | None = None
    anabranch_statement_cache_size: int = Field(default=100, ge=0, le=10_000)
    anabranch_embedding_provider: str | None = None

    @property
    def dsn(self) -> str:
        """The connection string.

        Raises:
            SettingsError: it is not set.
        """
        return _required(
            self.database_ingestion_connection_string,
            "DATABASE_INGESTION_CONNECTION_STRING",
            "a member of anabranch_writer",
        )


def environment_names(kind: type[BaseSettings] = Settings) -> frozenset[str]:
    """The names of all settings of a class, without the ``_FILE`` forms."""
    return frozenset(name.upper() for name in kind.model_fields)


def secret_names(kind: type[BaseSettings] = Settings) -> frozenset[str]:
    """The names of the settings that are secrets, which may also be given as ``<NAME>_FILE``."""
    return frozenset(
        name.upper() for name, field in kind.model_fields.items() if "SecretStr" in str(field.annotation)
    )


def load(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Those of other commands may stand beside them, here and in the functions below.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid setting.
    """
    environment = os.environ if environment is None else environment
    settings = _load(Settings, environment)
    # The stage's other settings may be invalid: they are not the worker's.
    fields = EmbedderSettings.model_fields
    _check_reply_topics(
        settings,
        [
            environment.get(name.upper()) or fields[name].default
            for name in ("anabranch_text_topic", "anabranch_text_dead_letter_topic")
        ],
    )
    return settings


def load_embedder(environment: Mapping[str, str] | None = None) -> tuple[Settings, EmbedderSettings]:
    """Read the settings of the embedding stage, besides the provider's.

    The first are the worker's, as the stage uses them: input topic, dead-letter topic and group are its own, and its
    output topic is the workers' input topic.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid setting.
    """
    worker, own = _load(Settings, environment), _load(EmbedderSettings, environment)
    topics = {
        own.anabranch_text_topic,
        own.anabranch_text_dead_letter_topic,
        worker.anabranch_input_topic,
        worker.anabranch_output_topic,
        worker.anabranch_dead_letter_topic,
    }
    if len(topics) < 5:  # noqa: PLR2004  # the number of topics
        raise SettingsError(
            "ANABRANCH_TEXT_TOPIC and ANABRANCH_TEXT_DEAD_LETTER_TOPIC must be different from each other and from"
            " ANABRANCH_INPUT_TOPIC, ANABRANCH_OUTPUT_TOPIC and ANABRANCH_DEAD_LETTER_TOPIC"
        )
    _check_reply_topics(worker, [own.anabranch_text_topic, own.anabranch_text_dead_letter_topic])
    if own.anabranch_embedder_group == worker.anabranch_consumer_group:
        raise SettingsError("ANABRANCH_EMBEDDER_GROUP must be different from ANABRANCH_CONSUMER_GROUP")
    stage = worker.model_copy(
        update={
            "anabranch_input_topic": own.anabranch_text_topic,
            "anabranch_output_topic": worker.anabranch_input_topic,
            "anabranch_dead_letter_topic": own.anabranch_text_dead_letter_topic,
            "anabranch_consumer_group": own.anabranch_embedder_group,
        }
    )
    return stage, own


def _check_reply_topics(settings: Settings, text_topics: Collection[str]) -> None:
    if not {*text_topics}.isdisjoint(settings.anabranch_reply_topics):
        raise SettingsError(
            "ANABRANCH_REPLY_TOPICS must not contain ANABRANCH_TEXT_TOPIC or ANABRANCH_TEXT_DEAD_LETTER_TOPIC"
        )


def load_embedding(environment: Mapping[str, str] | None = None) -> EmbeddingSettings:
    """Read the embedding stage's own settings.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid or missing setting.
    """
    settings = _load(EmbeddingSettings, environment)
    if settings.missing:
        raise SettingsError(f"{', '.join(settings.missing)} must be set")
    return settings


def load_embedding_if_set(environment: Mapping[str, str] | None = None) -> EmbeddingSettings | None:
    """As `load_embedding`, but None if no provider is set.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid or missing setting.
    """
    environment = os.environ if environment is None else environment
    return load_embedding(environment) if environment.get("ANABRANCH_EMBEDDING_PROVIDER") else None


def load_ingestion(environment: Mapping[str, str] | None = None) -> IngestionSettings:
    """Read the settings of ingestion.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid setting.
    """
    return _load(IngestionSettings, environment)


def load_all(environment: Mapping[str, str] | None = None) -> list[BaseSettings]:
    """Read the settings of all commands, the worker's first. Those that only some commands require may be missing.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid setting.
    """
    return [_load(kind, environment) for kind in _KINDS]


# All settings, so that the commands of an installation can share one environment.
_KINDS: Final[tuple[type[_FromMapping], ...]] = (
    Settings,
    EmbeddingSettings,
    EmbedderSettings,
    IngestionSettings,
)


def _known_names() -> set[str]:
    """The names of all settings, with the ``_FILE`` forms."""
    return {
        name
        for kind in _KINDS
        for name in (*environment_names(kind), *(f"{secret}_FILE" for secret in secret_names(kind)))
    }


def misspelt_names(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names in the environment that look like misspelt settings, with the settings that are probably meant.

    Other software has names with the same prefixes (``KAFKA_HEAP_OPTS``), so such a name is not an error: only one that
    closely resembles a setting is returned, and only if that setting is not set.

    Args:
        environment: used instead of the process's environment.
    """
    environment = os.environ if environment is None else environment
    known = _known_names()
    shared = sorted(name for name in known if not name.startswith(_PREFIX))
    prefixes = tuple({name.split("_")[0] + "_" for name in shared})
    found = {}
    for name, value in sorted(environment.items()):
        if value and name.startswith(prefixes) and name not in known:
            meant = get_close_matches(name, shared, n=1, cutoff=_MISSPELT)
            if meant and not environment.get(meant[0]):
                found[name] = meant[0]
    return found


def _with_guess(name: str, known: Collection[str]) -> str:
    """The unknown name, with the known one that is probably meant."""
    own = {each.removeprefix(_PREFIX): each for each in known if each.startswith(_PREFIX)}
    meant = get_close_matches(name.removeprefix(_PREFIX), own, n=1)
    return f"{name} (did you mean {own[meant[0]]}?)" if meant else name


def _load(kind: type[_Kind], environment: Mapping[str, str] | None) -> _Kind:
    environment = os.environ if environment is None else environment
    names, secrets = environment_names(kind), secret_names(kind)
    known = _known_names()
    unknown = sorted(
        name
        for name, value in environment.items()
        if name.startswith(_PREFIX)
        and name not in known
        and not _KUBERNETES_SERVICE_LINK.fullmatch(f"{name}={value}")
    )
    if unknown:
        raise SettingsError(
            f"unknown setting{'' if len(unknown) == 1 else 's'}"
            f" {', '.join(_with_guess(name, known) for name in unknown)}; rename or unset"
            f" {'it' if len(unknown) == 1 else 'them'}"
        )
    values: dict[str, Any] = {name.lower(): environment[name] for name in names if environment.get(name)}
    for name in sorted(secrets):
        path = environment.get(f"{name}_FILE")
        if not path:
            continue
        if name.lower() in values:
            raise SettingsError(f"{name} and {name}_FILE are both set; unset one of them")
        try:
            content = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SettingsError(f"{name}_FILE cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{name}_FILE is not UTF-8 text") from None
        if content:
            values[name.lower()] = content
    try:
        return kind(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_line(fault) for fault in error.errors(include_input=False))) from None


def _line(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"]).upper()
    what = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def _required(value: SecretStr | None, name: str, owner: str) -> str:
    if value is None:
        raise SettingsError(
            f"{name} is not set: set it to the connection string of {owner}, e.g. postgresql://user@host:5432/database"
        )
    return value.get_secret_value()
