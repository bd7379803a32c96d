"""Creates parts of a worker, and of the commands around it, from the settings."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace

from pydantic import SecretStr

from streams.broker.connection import BrokerConnection, UnusableCertificate
from streams.broker.topics import TopicSpec, topic_specs
from streams.core.messages import CONTRACT_VERSIONS, oldest_result_version
from streams.core.profiles import BUILTIN_PROFILES, Profile, ProfileError, overlay
from streams.settings import Settings, SettingsError
from streams.wire import BadWriterSchema, Codec

__all__ = [
    "broker_connection",
    "load_profiles",
    "open_codec",
    "required_topics",
    "result_contract",
]


def broker_connection(settings: Settings) -> BrokerConnection:
    """The Kafka connection from the settings.

    Raises:
        SettingsError: a certificate or key cannot be used; one line.
    """

    def secret(value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()

    connection = BrokerConnection(
        bootstrap_servers=settings.kafka_bootstrap_servers,
        security_protocol=settings.kafka_security_protocol,
        sasl_mechanism=settings.kafka_sasl_mechanism,
        username=settings.kafka_sasl_username,
        password=secret(settings.kafka_sasl_password),
        cafile=settings.kafka_ssl_cafile,
        certfile=settings.kafka_ssl_certfile,
        keyfile=settings.kafka_ssl_keyfile,
        key_password=secret(settings.kafka_ssl_key_password),
    )
    try:
        connection.client_options()
    except UnusableCertificate as error:
        raise SettingsError(str(error)) from None
    return connection


def load_profiles(settings: Settings) -> Mapping[str, Profile]:
    """The built-in profiles, overridden by the operator's file.

    Raises:
        SettingsError: the file cannot be read, is not valid TOML, or has a malformed profile; one line.
    """
    profiles: Mapping[str, Profile] = BUILTIN_PROFILES
    if settings.anabranch_profiles_file is not None:
        try:
            tables = tomllib.loads(settings.anabranch_profiles_file.read_text(encoding="utf-8"))
            profiles = overlay(BUILTIN_PROFILES, tables)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ProfileError) as error:
            raise SettingsError(f"ANABRANCH_PROFILES_FILE: {error}") from None
    if settings.anabranch_default_profile not in profiles:
        raise SettingsError(
            f"ANABRANCH_DEFAULT_PROFILE: there is no profile with this name; available: {', '.join(profiles)}"
        )
    return profiles


def open_codec(settings: Settings) -> Codec:
    """The codec, for the store's dimensions, with the writer schemas of `ANABRANCH_SCHEMA_PATH`.

    Raises:
        SettingsError: a schema there is unusable.
    """
    try:
        return Codec(settings.anabranch_schema_path, dimensions=settings.anabranch_embedding_dimensions)
    except (BadWriterSchema, OSError) as error:
        raise SettingsError(f"ANABRANCH_SCHEMA_PATH: {error}") from None


def required_topics(
    settings: Settings,
    stage: Settings | None,
    *,
    partitions: int,
    replication_factor: int,
    max_event_bytes: int,
) -> list[TopicSpec]:
    """The topics of a worker, with those for replies, and of an embedding stage if its settings are given."""
    specs: dict[str, TopicSpec] = {}
    for each in (settings, *([] if stage is None else [stage])):
        for spec in topic_specs(
            input_topic=each.anabranch_input_topic,
            output_topic=each.anabranch_output_topic,
            dead_letter_topic=each.anabranch_dead_letter_topic,
            partitions=partitions,
            replication_factor=replication_factor,
            max_event_bytes=max_event_bytes,
            reply_topics=each.anabranch_reply_topics,
        ):
            specs.setdefault(spec.name, replace(spec, texts=each is stage))
    return list(specs.values())


def result_contract(settings: Settings) -> str:
    """The minor version of the results' contract.

    Raises:
        SettingsError: that version cannot express results for the store's dimensions.
    """
    dimensions = settings.anabranch_embedding_dimensions
    contract, needed = settings.anabranch_result_contract, oldest_result_version(dimensions)
    if CONTRACT_VERSIONS.index(contract) < CONTRACT_VERSIONS.index(needed):
        raise SettingsError(
            f"ANABRANCH_RESULT_CONTRACT={contract} cannot express results for {dimensions} dimensions: upgrade all"
            f" consumers of the results, then set it to {needed}"
        )
    return contract
