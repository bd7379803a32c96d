"""All settings, read from the environment once and immutable.

Only the composition root and the command line use this module; everything else takes explicit arguments. Secrets may
also be in a file named by ``<NAME>_FILE``. Error messages never quote values, because they may be secrets.
"""

import os
import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, StringConstraints, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

__all__ = ["Settings", "SettingsError", "environment_names", "load", "secret_names"]

SettingName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)+$")]
TopicName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]

# Variables that Kubernetes injects for a Service named `anabranch`; ignored. They are recognized by name and value:
# ANABRANCH_PORT=8080 is a mistake for ANABRANCH_WEB_PORT.
_KUBERNETES_SERVICE_LINK = re.compile(
    r"ANABRANCH_(SERVICE_\w+=.*|PORT=(tcp|udp|sctp)://.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*)", re.DOTALL
)


class SettingsError(Exception):
    """A setting is missing, unknown or invalid; the message is one line."""


class Settings(BaseSettings):
    """The validated settings. Durations are in seconds."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, extra="ignore", allow_inf_nan=False)

    # The store's address; passed to asyncpg unchanged.
    database_connection_string: SecretStr | None = None
    # The owner's, for `migrate` and `stats`; workers never need it.
    database_admin_connection_string: SecretStr | None = None

    kafka_bootstrap_servers: str = "localhost:9092"
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
    anabranch_principals_setting: SettingName = "anabranch.principals"
    anabranch_schema_path: Path | None = None
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


def environment_names() -> frozenset[str]:
    """The names of all settings, without the ``_FILE`` forms."""
    return frozenset(name.upper() for name in Settings.model_fields)


def secret_names() -> frozenset[str]:
    """The names of the settings that are secrets, which may also be given as ``<NAME>_FILE``."""
    return frozenset(
        name.upper() for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
    )


def load(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environment: used instead of the process's environment.

    Raises:
        SettingsError: the message is one line that names every invalid setting.
    """
    environment = os.environ if environment is None else environment
    names, secrets = environment_names(), secret_names()
    known = names | {f"{name}_FILE" for name in secrets}
    unknown = sorted(
        name
        for name, value in environment.items()
        if name.startswith("ANABRANCH_")
        and name not in known
        and not _KUBERNETES_SERVICE_LINK.fullmatch(f"{name}={value}")
    )
    if unknown:
        raise SettingsError(f"unknown setting {', '.join(unknown)}")
    values: dict[str, Any] = {name.lower(): environment[name] for name in names if environment.get(name)}
    for name in sorted(secrets):
        path = environment.get(f"{name}_FILE")
        if not path:
            continue
        if name.lower() in values:
            raise SettingsError(f"{name} and {name}_FILE are both set; unset one of them")
        try:
            content = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{name}_FILE cannot be read: {type(error).__name__}") from None
        if content:
            values[name.lower()] = content
    try:
        return Settings(**values)
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
