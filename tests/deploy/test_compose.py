"""docker-compose.yml, as Compose itself reads it."""

import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from k8s.observability.rules import Parameters
from streams import settings
from streams.cli.main import commands
from streams.configured import result_contract
from tests.deploy.processes import ComposeProcesses, secret
from tests.left_out import unavailable

ONE_SHOTS = {"migrate", "roles", "sample", "text-topics", "topics"}
ON_REQUEST = {"sample": "sample", "embedder": "embedder", "text-topics": "embedder"}
# What each service logs in with, and nothing else.
SECRETS = {
    "alertmanager": set(),
    "embedder": {"embedding-key"},
    "grafana": {"grafana-password"},
    "kafka": set(),
    "migrate": {"owner-connection"},
    "postgres": {"superuser-password"},
    "postgres-exporter": {"monitoring-password"},
    "prometheus": set(),
    "roles": {
        *("superuser-password", "owner-password", "worker-password"),
        *("ingestion-password", "monitoring-password"),
    },
    "sample": {"ingestion-connection"},
    "text-topics": set(),
    "topics": set(),
    "worker": {"worker-connection"},
}


def _seconds(duration: str) -> float:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


@pytest.fixture
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(compose["services"])


@pytest.fixture
def ours(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The services that run our image, and therefore read our settings."""
    return {name: service for name, service in services.items() if service["image"].startswith("anabranch")}


def test_every_variable_has_a_default(root: Path) -> None:
    # `docker compose up` in a fresh clone; and the one form of interpolation that the fixture above knows.
    text = (root / "docker-compose.yml").read_text()
    assert len(re.findall(r"\$\{\w+:-[^}]*\}", text)) == text.count("$") > 0


def test_everything_is_there(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == set(SECRETS)


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
        ("sample", "worker", "service_healthy"),
        ("text-topics", "topics", "service_completed_successfully"),
        ("embedder", "text-topics", "service_completed_successfully"),
        ("embedder", "kafka", "service_healthy"),
        ("postgres-exporter", "roles", "service_completed_successfully"),
    ],
)
def test_order_of_the_start(
    services: dict[str, dict[str, Any]], service: str, dependency: str, condition: str
) -> None:
    assert services[service]["depends_on"][dependency]["condition"] == condition


def test_whatever_stays_has_a_health_check(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if name in ONE_SHOTS:
            # One that is restarted has never completed; the image's health check has nothing to ask here.
            assert service["restart"] == "no"
            assert service["healthcheck"] == {"disable": True}
        else:
            assert service["restart"] == "unless-stopped"
            assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name
            assert _seconds(service["healthcheck"]["timeout"]) < _seconds(service["healthcheck"]["interval"])


def test_what_starts_only_on_request(services: dict[str, dict[str, Any]]) -> None:
    assert {name: service["profiles"] for name, service in services.items() if "profiles" in service} == {
        name: [profile] for name, profile in ON_REQUEST.items()
    }
    # Or it would start with them.
    for name, service in services.items():
        if name not in ON_REQUEST:
            assert not service.get("depends_on", {}).keys() & ON_REQUEST.keys()


def test_commands_are_the_command_lines(ours: dict[str, dict[str, Any]]) -> None:
    assert {name: service["command"] for name, service in ours.items() if "command" in service} == {
        "embedder": ["embedder"],
        "migrate": ["migrate"],
        "text-topics": ["topics", "--texts"],
        "topics": ["topics"],
        "worker": ["worker"],
    }


def test_every_command_exists(ours: dict[str, dict[str, Any]], root: Path) -> None:
    named = {service["command"][0] for service in ours.values() if "command" in service}
    for file in (root / "k8s").rglob("*.md"):
        named |= set(re.findall(r"`anabranch ([a-z]+)`", file.read_text()))
    assert named <= commands.commands.keys()


def _load(processes: ComposeProcesses, name: str) -> settings.Settings:
    environment = processes.environment(name)
    return settings.load_embedder(environment)[0] if name == "embedder" else settings.load(environment)


def test_every_variable_is_a_setting(ours: dict[str, dict[str, Any]], processes: ComposeProcesses) -> None:
    embedding = settings.EmbeddingSettings
    for name, service in ours.items():
        names = settings.environment_names() | {f"{secret}_FILE" for secret in settings.secret_names()}
        if name == "embedder":
            names |= settings.environment_names(embedding)
            names |= {f"{secret}_FILE" for secret in settings.secret_names(embedding)}
        assert set(service["environment"]) <= names, name
        _load(processes, name)


@pytest.fixture
def processes(compose: dict[str, Any], root: Path, tmp_path: Path) -> ComposeProcesses:
    return ComposeProcesses(compose, root, tmp_path, {})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("openai", "text-embedding-3-small", None, 768)),
        (
            {
                "EMBEDDING_PROVIDER": "cohere",
                "EMBEDDING_MODEL": "embed-english-v3.0",
                "EMBEDDING_BASE_URL": "https://cohere.example.com",
                "EMBEDDING_DIMENSIONS": "1024",
                "RESULT_CONTRACT": "1.1.0",
            },
            ("cohere", "embed-english-v3.0", "https://cohere.example.com", 1024),
        ),
    ],
)
def test_the_variables_choose_model_and_dimensions(
    render_compose: Callable[..., dict[str, Any]],
    root: Path,
    tmp_path: Path,
    *,
    variables: dict[str, str],
    expected: tuple[str, str, str | None, int],
) -> None:
    processes = ComposeProcesses(render_compose(variables), root, tmp_path, {})
    given = processes.environment("embedder")
    key = Path(given["ANABRANCH_EMBEDDING_API_KEY_FILE"])
    assert key.read_text() == ""  # for a server that needs none
    if variables:
        key.write_text("a key\n")
    found = settings.load_embedding(given)
    assert (
        found.anabranch_embedding_provider,
        found.anabranch_embedding_model,
        found.anabranch_embedding_base_url,
        found.anabranch_embedding_dimensions,
    ) == expected
    assert (found.anabranch_embedding_api_key is None) == (not variables)
    loaded = [_load(processes, name) for name in ("embedder", "migrate", "worker")]
    assert {each.anabranch_embedding_dimensions for each in loaded} == {expected[-1]}
    result_contract(loaded[-1])


def test_the_embedding_stage_writes_what_the_workers_read(processes: ComposeProcesses) -> None:
    stage, worker = _load(processes, "embedder"), _load(processes, "worker")
    assert stage.anabranch_output_topic == worker.anabranch_input_topic
    assert stage.kafka_bootstrap_servers == worker.kafka_bootstrap_servers
    created, _ = settings.load_embedder(processes.environment("text-topics"))
    for name in ("input", "output", "dead_letter"):
        assert getattr(stage, f"anabranch_{name}_topic") == getattr(created, f"anabranch_{name}_topic")


def test_each_gets_the_connection_it_needs_and_no_other(
    ours: dict[str, dict[str, Any]], processes: ComposeProcesses
) -> None:
    loaded = {name: _load(processes, name) for name in ours}
    assert urlsplit(loaded["migrate"].admin_dsn).username == "anabranch_owner"
    assert urlsplit(loaded["worker"].store_dsn).username == "anabranch_worker"
    assert urlsplit(loaded["sample"].store_dsn).username == "anabranch_ingestion"
    assert [name for name, each in loaded.items() if each.database_admin_connection_string] == ["migrate"]
    assert set(ours["topics"]["environment"]) == {"KAFKA_BOOTSTRAP_SERVERS"}


def test_secrets_are_files_and_each_service_sees_only_its_own(compose: dict[str, Any]) -> None:
    services = compose["services"]
    given = {
        name: {entry["source"] for entry in service.get("secrets", [])} for name, service in services.items()
    }
    assert given == SECRETS
    # From a file: Compose refuses any other for a read-only root file system.
    assert {name: set(source) for name, source in compose["secrets"].items()} == {
        name: {"name", "file"} for name in set().union(*SECRETS.values())
    }
    for name, service in services.items():
        named = {
            value.removeprefix("/run/secrets/")
            for value in service.get("environment", {}).values()
            if value.startswith("/run/secrets/")
        }
        assert named == SECRETS[name]


def test_no_password_is_in_a_variable(compose: dict[str, Any]) -> None:
    passwords = {secret(compose, name) for name in compose["secrets"] if name.endswith("-password")}
    for name, service in compose["services"].items():
        shown = repr([service.get("environment"), service.get("command"), service.get("healthcheck")])
        assert not [password for password in passwords if password in shown], name
        for variable in service.get("environment", {}):
            assert "PASS" not in variable or variable.endswith("_FILE"), f"{name}: {variable}"


@pytest.mark.parametrize("passwords", ["defaults", "own"])
def test_whoever_logs_in_has_the_password_that_was_set(
    render_compose: Callable[..., dict[str, Any]], run: Callable[..., Any], tmp_path: Path, passwords: str
) -> None:
    directory = tmp_path / "own"
    variables = {}
    if passwords == "own":
        assert run(["k8s/compose/new-secrets", str(directory)]).returncode == 0
        variables = {"SECRETS_DIRECTORY": str(directory)}
    compose = render_compose(variables)
    values = {name: secret(compose, name) for name in compose["secrets"]}
    image, roles = (compose["services"][name]["environment"] for name in ("postgres", "roles"))
    assert roles["PGUSER"] == image["POSTGRES_USER"]
    assert roles["PGPASSWORD_FILE"] == image["POSTGRES_PASSWORD_FILE"]
    for role in ("owner", "worker", "ingestion"):
        uri = urlsplit(values[f"{role}-connection"])
        assert roles[f"{role.upper()}_PASSWORD_FILE"] == f"/run/secrets/{role}-password"
        assert (uri.username, uri.password) == (f"anabranch_{role}", values[f"{role}-password"])
        assert (uri.hostname, uri.path) == ("postgres", f"/{image['POSTGRES_DB']}")
        assert uri.hostname == roles["PGHOST"]
    exporter = compose["services"]["postgres-exporter"]["environment"]
    assert exporter["DATA_SOURCE_PASS_FILE"] == roles["MONITORING_PASSWORD_FILE"]
    assert exporter["DATA_SOURCE_URI"].startswith(f"postgres:5432/{image['POSTGRES_DB']}?")
    different = [value for name, value in values.items() if name.endswith("-password")]
    assert len(set(different)) == len(different)
    if passwords == "own":
        assert not [value for value in different if "local-use" in value or len(value) < 32]


def test_own_secrets_can_be_mounted_and_read_by_nobody_else(
    run: Callable[..., Any], compose: dict[str, Any], tmp_path: Path
) -> None:
    directory = tmp_path / "own"
    assert run(["k8s/compose/new-secrets", str(directory)]).returncode == 0
    assert {file.name for file in directory.iterdir()} == set(compose["secrets"])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    # A container's user is another than the owner, and sees the file itself, not the directory.
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o644}
    before = {file.name: file.read_text() for file in directory.iterdir()}
    assert run(["k8s/compose/new-secrets", str(directory)]).returncode != 0
    assert {file.name: file.read_text() for file in directory.iterdir()} == before


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
    for name in ("embedder", "text-topics", "topics", "worker"):
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


def test_a_stop_lets_events_finish(services: dict[str, dict[str, Any]], processes: ComposeProcesses) -> None:
    for name in ("worker", "embedder"):
        grace = _load(processes, name).anabranch_grace_period_seconds
        assert _seconds(services[name]["stop_grace_period"]) >= grace + 10


def test_containers_can_do_little(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "cap_add" not in service
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged")
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}


def test_containers_have_limits(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["mem_limit"], name
        assert 32 <= service["pids_limit"] <= 512, name
        # Docker rejects a limit above the number of CPUs.
        assert 0 < service["cpus"] <= 2, name
        for mount in service.get("tmpfs", []):
            assert re.match(r"/[\w/-]+:size=\d+m", mount), f"{name}: {mount}"


def test_our_containers_write_to_tmp_alone(ours: dict[str, dict[str, Any]]) -> None:
    for service in ours.values():
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
        "alertmanager": "/alertmanager",
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


def test_hnsw_builds_fit_into_shared_memory(services: dict[str, dict[str, Any]]) -> None:
    megabytes = re.search(r"maintenance_work_mem=(\d+)MB", " ".join(services["postgres"]["command"]))
    assert megabytes is not None
    shared = str(services["postgres"]["shm_size"])
    shared_bytes = int(shared) if shared.isdigit() else int(shared.removesuffix("m")) * 1024**2
    assert shared_bytes > int(megabytes[1]) * 1024**2


def test_prometheus_scrapes_every_worker(services: dict[str, dict[str, Any]], root: Path) -> None:
    config = yaml.safe_load((root / "k8s/observability/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for name, job in (("worker", jobs[Parameters().jobs]), ("embedder", jobs[Parameters().embedder_jobs])):
        discovery = job["dns_sd_configs"][0]
        assert job["metrics_path"] == "/metrics"
        assert discovery["names"] == [name]
        assert discovery["type"] == "A"
        assert str(discovery["port"]) in services[name]["expose"]
    mounted = {mount["target"] for mount in services["prometheus"]["volumes"]}
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    assert "/etc/prometheus" in mounted


def test_prometheus_reaches_the_exporter_and_alertmanager(
    services: dict[str, dict[str, Any]], root: Path
) -> None:
    config = yaml.safe_load((root / "k8s/observability/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    exporter = jobs["postgres"]["static_configs"][0]["targets"][0]
    (alertmanager,) = config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    for target, ports in (
        (exporter, services["postgres-exporter"]["expose"]),
        (alertmanager, [str(port["target"]) for port in services["alertmanager"]["ports"]]),
    ):
        name, _, port = target.partition(":")
        assert name in services
        assert [port] == ports
        assert f":{port}/" in services[name]["healthcheck"]["test"][-1]
    for name in ("anabranch", "anabranch-embedder", "postgres"):
        assert [each["target_label"] for each in jobs[name]["relabel_configs"]] == ["namespace"]


@pytest.fixture
def amtool(which: Callable[[str], str | None]) -> str:
    return which("amtool") or unavailable(
        "amtool is not installed", enable="install Alertmanager (Debian's package `prometheus-alertmanager`)"
    )


def test_alerts_go_where_their_severity_says(
    amtool: str, run: Callable[..., Any], services: dict[str, dict[str, Any]], root: Path
) -> None:
    (mount,) = (
        mount for mount in services["alertmanager"]["volumes"] if mount["target"] == "/etc/alertmanager"
    )
    assert "--config.file=/etc/alertmanager/alertmanager.yml" in services["alertmanager"]["command"]
    file = Path(mount["source"], "alertmanager.yml")
    assert file.is_relative_to(root)
    checked = run([amtool, "check-config", str(file)])
    assert checked.returncode == 0, checked.stderr
    for severity, receiver in {"page": "page", "ticket": "ticket", "typo": "page"}.items():
        routed = run(
            [amtool, "config", "routes", "test", f"--config.file={file}", f"severity={severity}", "slo=age"]
        )
        assert (routed.returncode, routed.stdout.strip()) == (0, receiver)


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
