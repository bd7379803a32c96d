"""docker-compose.yml, as Compose itself reads it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from streams import settings
from streams.cli.main import commands

ONE_SHOTS = ("migrate", "roles", "topics")


def _seconds(duration: str) -> float:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


@pytest.fixture
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(compose["services"])


@pytest.fixture
def ours(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The services that run our image, and therefore read our settings."""
    return {name: service for name, service in services.items() if service["image"].startswith("anabranch:")}


def test_every_variable_has_a_default(root: Path) -> None:
    # `docker compose up` in a fresh clone; and the one form of interpolation that the fixture above knows.
    text = (root / "docker-compose.yml").read_text()
    assert len(re.findall(r"\$\{\w+:-[^}]+\}", text)) == text.count("$") > 0


def test_everything_is_there(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {
        "kafka",
        "postgres",
        "migrate",
        "roles",
        "topics",
        "worker",
        "prometheus",
        "grafana",
    }


def test_every_image_is_pinned_to_a_full_version(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        _, _, tag = service["image"].rpartition(":")
        assert re.match(r"v?\d+\.\d+\.\d+", tag), f"{name}: {service['image']}"


def test_kafka_is_a_supported_major_and_postgres_has_iterative_scans(
    services: dict[str, dict[str, Any]],
) -> None:
    assert re.match(r"apache/kafka:4\.", services["kafka"]["image"])
    version = re.fullmatch(
        r"pgvector/pgvector:(\d+)\.(\d+)\.(\d+)-pg18(-\w+)?", services["postgres"]["image"]
    )
    assert version is not None
    # 0.8.2 closes a buffer overflow in parallel HNSW builds.
    assert tuple(int(version[group]) for group in (1, 2, 3)) >= (0, 8, 2)
    assert services["roles"]["image"] == services["postgres"]["image"]


@pytest.mark.parametrize(
    ("service", "dependency", "condition"),
    [
        ("roles", "postgres", "service_healthy"),
        ("migrate", "postgres", "service_healthy"),
        ("migrate", "roles", "service_completed_successfully"),
        ("topics", "kafka", "service_healthy"),
        ("worker", "kafka", "service_healthy"),
        ("worker", "postgres", "service_healthy"),
        ("worker", "migrate", "service_completed_successfully"),
        ("worker", "roles", "service_completed_successfully"),
        ("worker", "topics", "service_completed_successfully"),
    ],
)
def test_order_of_the_start(
    services: dict[str, dict[str, Any]], service: str, dependency: str, condition: str
) -> None:
    assert services[service]["depends_on"][dependency]["condition"] == condition


def test_whoever_is_waited_for_has_a_health_check(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        for name, dependency in service.get("depends_on", {}).items():
            if dependency["condition"] == "service_healthy":
                assert services[name]["healthcheck"]["test"]


def test_one_shots_end(services: dict[str, dict[str, Any]]) -> None:
    for name in ONE_SHOTS:
        # One that is restarted has never completed; the image's health check has nothing to ask here.
        assert services[name]["restart"] == "no"
        assert services[name]["healthcheck"] == {"disable": True}


def test_commands_are_the_command_lines(ours: dict[str, dict[str, Any]]) -> None:
    assert {name: service["command"] for name, service in ours.items()} == {
        "migrate": ["migrate"],
        "topics": ["topics"],
        "worker": ["worker"],
    }


def test_every_command_exists(ours: dict[str, dict[str, Any]], root: Path) -> None:
    named = {service["command"][0] for service in ours.values()}
    for file in (root / "k8s").rglob("*.md"):
        named |= set(re.findall(r"`anabranch ([a-z]+)`", file.read_text()))
    assert named <= commands.commands.keys()


def test_every_variable_is_a_setting(ours: dict[str, dict[str, Any]]) -> None:
    names = settings.environment_names() | {f"{name}_FILE" for name in settings.secret_names()}
    for name, service in ours.items():
        assert set(service["environment"]) <= names, name
        settings.load(service["environment"])


def test_each_gets_the_connection_it_needs_and_no_other(ours: dict[str, dict[str, Any]]) -> None:
    assert urlsplit(settings.load(ours["migrate"]["environment"]).admin_dsn).username == "anabranch_owner"
    assert urlsplit(settings.load(ours["worker"]["environment"]).store_dsn).username == "anabranch_worker"
    assert "DATABASE_ADMIN_CONNECTION_STRING" not in ours["worker"]["environment"]
    assert set(ours["topics"]["environment"]) == {"KAFKA_BOOTSTRAP_SERVERS"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {
            "SUPERUSER_PASSWORD": "s",
            "OWNER_PASSWORD": "o",
            "WORKER_PASSWORD": "w",
            "INGESTION_PASSWORD": "i",
            "GRAFANA_ADMIN_PASSWORD": "g",
        },
    ],
    ids=["defaults", "own passwords"],
)
def test_whoever_logs_in_has_the_password_that_was_set(
    render_compose: Callable[..., dict[str, Any]], environment: dict[str, str]
) -> None:
    services = render_compose(environment)["services"]
    image = services["postgres"]["environment"]
    roles = services["roles"]["environment"]
    migrate = urlsplit(services["migrate"]["environment"]["DATABASE_ADMIN_CONNECTION_STRING"])
    worker = urlsplit(services["worker"]["environment"]["DATABASE_CONNECTION_STRING"])
    assert (roles["PGUSER"], roles["PGPASSWORD"]) == (image["POSTGRES_USER"], image["POSTGRES_PASSWORD"])
    assert migrate.username != image["POSTGRES_USER"]
    assert migrate.password == roles["OWNER_PASSWORD"]
    assert worker.password == roles["WORKER_PASSWORD"]
    assert {migrate.path, worker.path, f"/{roles['PGDATABASE']}"} == {f"/{image['POSTGRES_DB']}"}
    assert {migrate.hostname, worker.hostname, roles["PGHOST"]} == {"postgres"}
    if environment:
        assert image["POSTGRES_PASSWORD"] == "s"
        assert roles["OWNER_PASSWORD"] == "o"
        assert roles["WORKER_PASSWORD"] == "w"
        assert roles["INGESTION_PASSWORD"] == "i"
        assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "g"


def test_clients_come_back_to_the_listener_they_came_from(
    render_compose: Callable[..., dict[str, Any]],
) -> None:
    services = render_compose({"KAFKA_HOST_PORT": "19999"})["services"]
    kafka = services["kafka"]["environment"]

    def addresses(name: str) -> dict[str, str]:
        return dict(entry.split("://", 1) for entry in kafka[name].split(","))

    advertised, listeners = addresses("KAFKA_ADVERTISED_LISTENERS"), addresses("KAFKA_LISTENERS")
    protocols = dict(
        entry.split(":", 1) for entry in kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    )
    assert set(listeners) == set(protocols)
    # A controller's listener is advertised to nobody.
    assert set(listeners) - set(advertised) == {kafka["KAFKA_CONTROLLER_LISTENER_NAMES"]}
    assert kafka["KAFKA_INTER_BROKER_LISTENER_NAME"] == "INTERNAL"
    for name in ("topics", "worker"):
        assert services[name]["environment"]["KAFKA_BOOTSTRAP_SERVERS"] == advertised["INTERNAL"]
    assert advertised["INTERNAL"].split(":")[1] == listeners["INTERNAL"].split(":")[1]
    published = services["kafka"]["ports"][0]
    assert f"localhost:{published['published']}" == advertised["EXTERNAL"] == "localhost:19999"
    assert str(published["target"]) == listeners["EXTERNAL"].split(":")[1]
    voters = kafka["KAFKA_CONTROLLER_QUORUM_VOTERS"]
    assert voters == f"{kafka['KAFKA_NODE_ID']}@kafka:{listeners['CONTROLLER'].split(':')[1]}"


def test_a_mistyped_topic_is_not_created(services: dict[str, dict[str, Any]]) -> None:
    assert services["kafka"]["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def test_worker_scales(services: dict[str, dict[str, Any]]) -> None:
    worker = services["worker"]
    assert "container_name" not in worker
    assert "ports" not in worker
    assert worker["expose"] == [str(settings.Settings().anabranch_web_port)]


def test_a_stop_lets_events_finish(services: dict[str, dict[str, Any]]) -> None:
    grace = settings.load(services["worker"]["environment"]).anabranch_grace_period_seconds
    assert _seconds(services["worker"]["stop_grace_period"]) >= grace + 10


def test_our_containers_can_do_little(ours: dict[str, dict[str, Any]]) -> None:
    for service in ours.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        # Faust wants a data directory, and a temporary one is in /tmp.
        assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]


def test_nobody_else_reaches_the_ports(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1"


def test_data_outlives_the_containers(compose: dict[str, Any]) -> None:
    kept = {
        "kafka": compose["services"]["kafka"]["environment"]["KAFKA_LOG_DIRS"],
        # The parent of PGDATA in the images of PostgreSQL 18; these refuse /var/lib/postgresql/data.
        "postgres": "/var/lib/postgresql",
        "prometheus": "/prometheus",
        "grafana": "/var/lib/grafana",
    }
    for name, target in kept.items():
        mounts = compose["services"][name]["volumes"]
        volumes = {mount["target"]: mount["source"] for mount in mounts if mount["type"] == "volume"}
        assert list(volumes) == [target]
        assert volumes[target] in compose["volumes"]


def test_what_is_mounted_exists(services: dict[str, dict[str, Any]]) -> None:
    binds = [
        mount
        for service in services.values()
        for mount in service.get("volumes", [])
        if mount["type"] == "bind"
    ]
    assert binds
    for mount in binds:
        assert Path(mount["source"]).exists(), mount["source"]
        assert mount["read_only"] is True


def test_memory_is_bounded(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service.get("mem_limit"), name


def test_hnsw_builds_fit_into_shared_memory(services: dict[str, dict[str, Any]]) -> None:
    megabytes = re.search(r"maintenance_work_mem=(\d+)MB", " ".join(services["postgres"]["command"]))
    assert megabytes is not None
    shared = str(services["postgres"]["shm_size"])
    shared_bytes = int(shared) if shared.isdigit() else int(shared.removesuffix("m")) * 1024**2
    assert shared_bytes > int(megabytes[1]) * 1024**2


def test_prometheus_scrapes_every_worker(services: dict[str, dict[str, Any]], root: Path) -> None:
    config = yaml.safe_load((root / "k8s/observability/prometheus/prometheus.yml").read_text())
    job = next(job for job in config["scrape_configs"] if job["job_name"] == "anabranch")
    discovery = job["dns_sd_configs"][0]
    assert job["metrics_path"] == "/metrics"
    assert discovery["names"] == ["worker"]
    assert discovery["type"] == "A"
    assert str(discovery["port"]) in services["worker"]["expose"]
    mounted = {mount["target"] for mount in services["prometheus"]["volumes"]}
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    assert "/etc/prometheus" in mounted


def test_grafana_finds_what_is_provisioned(services: dict[str, dict[str, Any]], root: Path) -> None:
    mounts = {mount["target"]: Path(mount["source"]) for mount in services["grafana"]["volumes"]}
    provisioning = mounts["/etc/grafana/provisioning"]
    datasource = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"][0]
    url = urlsplit(datasource["url"])
    assert url.hostname in services
    assert url.port == services[url.hostname]["ports"][0]["target"]
    provider = yaml.safe_load((provisioning / "dashboards/anabranch.yml").read_text())["providers"][0]
    folder = mounts[provider["options"]["path"]]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (folder / Path(home).name).is_file()
    assert home == f"{provider['options']['path']}/{Path(home).name}"
    assert folder.is_relative_to(root)
