"""k8s/, as Kustomize renders it: workers, Jobs, settings and secrets. The components have a test of their own."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streams
from streams import settings
from streams.cli.main import NEEDS_CONSENT, commands

Manifest = dict[str, Any]
Render = Callable[[str], list[Manifest]]

# Kustomizations of workers, and those of the Jobs of the same release.
WORKERS = {
    "base": "jobs",
    "overlays/dev": "overlays/dev/jobs",
    "overlays/production": "overlays/production/jobs",
    "overlays/production-embedder": "overlays/production-embedder/jobs",
}
WITH_EMBEDDER = "overlays/production-embedder"
EMBEDDING_SECRETS = settings.secret_names(settings.EmbeddingSettings)
# Not the default: a pod has no broker on its own localhost.
NO_DEFAULT = {"KAFKA_BOOTSTRAP_SERVERS"}
RELEASE = streams.__version__.replace(".", "-")


@pytest.fixture(params=WORKERS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifests(render_kubernetes: Render, overlay: str) -> list[Manifest]:
    """The workers' objects."""
    return render_kubernetes(overlay)


@pytest.fixture
def jobs(render_kubernetes: Render, overlay: str) -> list[Manifest]:
    """The objects of the Jobs."""
    return render_kubernetes(WORKERS[overlay])


def _one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """By its name without the hash of its content."""
    (found,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and name in (None, _plain(manifest["metadata"]["name"]))
    )
    return found


def _plain(name: str) -> str:
    return re.sub(r"-[a-z0-9]{10}$", "", name)


def _pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """By component."""
    return {
        manifest["metadata"]["labels"]["app.kubernetes.io/component"]: manifest["spec"]["template"]["spec"]
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
    """What the process sees of the workers' settings, with something in the place of every secret."""
    container = _container(pod)
    environment = dict(values) if "envFrom" in container else {}
    for variable in container["env"]:
        reference = variable["valueFrom"].get("configMapKeyRef")
        environment[variable["name"]] = (
            values[reference["key"]] if reference else "postgresql://somebody@somewhere/db"
        )
    return environment


@pytest.fixture
def pods(manifests: list[Manifest], jobs: list[Manifest]) -> dict[str, Manifest]:
    """All of them, by component."""
    return _pods(manifests) | _pods(jobs)


@pytest.fixture
def worker(pods: dict[str, Manifest]) -> Manifest:
    return pods["worker"]


@pytest.fixture
def stages(pods: dict[str, Manifest]) -> dict[str, Manifest]:
    """What runs all the time: the workers, and in one overlay the embedding stage."""
    return {name: pod for name, pod in pods.items() if name in {"worker", "embedder"}}


@pytest.fixture
def values(manifests: list[Manifest]) -> dict[str, str]:
    """The ConfigMap's settings."""
    return dict(_one(manifests, "ConfigMap", "anabranch")["data"])


@pytest.fixture
def loaded(manifests: list[Manifest], pods: dict[str, Manifest], values: dict[str, str]) -> dict[str, Any]:
    """The settings of each process, by component; an embedding stage's as it uses them."""
    found: dict[str, Any] = {
        name: settings.load(_environment(pod, values)) for name, pod in pods.items() if name != "embedder"
    }
    if "embedder" in pods:
        found["embedder"], _ = settings.load_embedder(_environment_of_embedder(manifests))
    return found


def _environment_of_embedder(manifests: list[Manifest]) -> dict[str, str]:
    """What the process sees, with something in the place of secrets and of the files that contain them."""
    both = [_one(manifests, "ConfigMap", name)["data"] for name in ("anabranch", "anabranch-embedder")]
    files = {f"{name}_FILE": name for name in EMBEDDING_SECRETS}
    secrets = dict.fromkeys(_secrets(_pods(manifests)["embedder"]), "a secret")
    # The later one overrides the earlier one.
    return {files.get(name, name): value for each in (*both, secrets) for name, value in each.items()}


@pytest.fixture(scope="session")
def settings_file(root: Path) -> str:
    return (root / "k8s/settings/settings.env").read_text()


def _names(manifests: list[Manifest]) -> list[tuple[str, str]]:
    return sorted(
        (manifest["kind"], re.sub(r"-[a-z0-9]{10}$", "-HASH", manifest["metadata"]["name"]))
        for manifest in manifests
    )


def test_everything_is_there(render_kubernetes: Render) -> None:
    assert _names(render_kubernetes("base")) == [
        ("ConfigMap", "anabranch-HASH"),
        ("Deployment", "anabranch-worker"),
        ("PodDisruptionBudget", "anabranch-worker"),
        ("Service", "anabranch-worker"),
        ("ServiceAccount", "anabranch"),
    ]
    assert _names(render_kubernetes("jobs")) == [
        ("ConfigMap", "anabranch"),
        ("Job", f"anabranch-migrate-{RELEASE}"),
        ("Job", f"anabranch-topics-{RELEASE}"),
        ("ServiceAccount", "anabranch-jobs"),
    ]


def test_nothing_is_in_both(manifests: list[Manifest], jobs: list[Manifest]) -> None:
    """Who applied an object last would decide what it is."""
    assert not set(_names(manifests)) & set(_names(jobs))


def test_only_overlays_know_a_namespace(root: Path, overlay: str, render_kubernetes: Render) -> None:
    for folder in ("base", "jobs", "settings", "components"):
        for file in (root / "k8s" / folder).rglob("*.yaml"):
            assert not re.search(r"^\s*namespace:", file.read_text(), re.MULTILINE), file.name
    of_workers, of_jobs = (
        {manifest["metadata"].get("namespace") for manifest in render_kubernetes(path)}
        for path in (overlay, WORKERS[overlay])
    )
    assert of_workers == of_jobs
    assert len(of_workers) == 1
    assert (of_workers == {None}) == (overlay == "base")


def test_image_is_the_version(pods: dict[str, Manifest]) -> None:
    # The same for all others: the Jobs prepare for the workers of their release.
    (image,) = {_container(pod)["image"] for name, pod in pods.items() if name != "embedder"}
    assert re.fullmatch(rf"([\w.-]+/)*anabranch:{re.escape(streams.__version__)}", image)
    if "embedder" in pods:
        # With the providers' packages.
        assert _container(pods["embedder"])["image"] == image.replace("anabranch:", "anabranch-embedder:")


def test_each_runs_its_command(pods: dict[str, Manifest], overlay: str) -> None:
    replicas = 1 if overlay == "overlays/dev" else 3
    texts, stage = (["--texts"], {"embedder": ["embedder"]}) if overlay == WITH_EMBEDDER else ([], {})
    assert {name: _container(pod)["args"] for name, pod in pods.items()} == {
        "migrate": ["migrate"],
        "topics": ["topics", "--partitions=12", f"--replication-factor={replicas}", *texts],
        "worker": ["worker"],
        **stage,
    }


def test_command_lines_are_understood(pods: dict[str, Manifest]) -> None:
    for pod in pods.values():
        name, *arguments = _container(pod)["args"]
        commands.commands[name].make_context(name, arguments)


def test_probes_ask_the_right_page(stages: dict[str, Manifest], loaded: dict[str, Any]) -> None:
    for name, pod in stages.items():
        container = _container(pod)
        (port,) = container["ports"]
        assert port["containerPort"] == loaded[name].anabranch_web_port
        for probe, path in (
            ("startupProbe", "/healthz/live"),
            ("livenessProbe", "/healthz/live"),
            ("readinessProbe", "/healthz/ready"),
        ):
            assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 60


def test_events_in_flight_are_finished(stages: dict[str, Manifest], loaded: dict[str, Any]) -> None:
    for name, pod in stages.items():
        grace = loaded[name].anabranch_grace_period_seconds
        # The process exits 5 s after the grace period in any case.
        assert pod["terminationGracePeriodSeconds"] >= grace + 10
        # A member that drains for longer than the rebalance waits is thrown out of the group.
        assert grace < loaded[name].anabranch_rebalance_timeout_seconds


def test_pods_satisfy_the_restricted_profile(pods: dict[str, Manifest]) -> None:
    """Kubernetes' Pod Security Standards, and more."""
    for name, pod in pods.items():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
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
        assert "initContainers" not in pod
        assert not [port for port in container.get("ports", []) if "hostPort" in port]
        assert {"mountPath": "/tmp", "name": "tmp"} in container["volumeMounts"]
        sources = {volume["name"]: volume.keys() - {"name"} for volume in pod["volumes"]}
        assert sources["tmp"] == {"emptyDir"}
        # Nothing of the node's.
        assert set().union(*sources.values()) <= {"emptyDir", "secret", "configMap"}
        assert pod["automountServiceAccountToken"] is False
        # Kubernetes would inject ANABRANCH_* variables, and unknown ones stop the start.
        assert pod["enableServiceLinks"] is False


def _number(quantity: str) -> float:
    units = {"m": 0.001, "Mi": 1024**2, "Gi": 1024**3, "": 1}
    amount = re.fullmatch(r"([\d.]+)(\D*)", str(quantity))
    assert amount is not None
    return float(amount[1]) * units[amount[2]]


def test_pods_have_requests_and_limits(pods: dict[str, Manifest]) -> None:
    for pod in pods.values():
        resources = _container(pod)["resources"]
        for kind in ("requests", "limits"):
            assert resources[kind].keys() == {"cpu", "memory", "ephemeral-storage"}
        for name, request in resources["requests"].items():
            assert _number(request) <= _number(resources["limits"][name])
        (tmp,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "tmp")
        assert _number(tmp["sizeLimit"]) < _number(resources["limits"]["ephemeral-storage"])


def test_compose_has_the_same_limits(stages: dict[str, Manifest], compose: dict[str, Any]) -> None:
    for name, pod in stages.items():
        limits = _container(pod)["resources"]["limits"]
        service = compose["services"][name]
        assert _number(service["mem_limit"].replace("m", "Mi")) == _number(limits["memory"])
        assert service["cpus"] == _number(limits["cpu"])


def test_user_is_the_image_s(pods: dict[str, Manifest], dockerfile: list[tuple[str, str]]) -> None:
    (user,) = (arguments for name, arguments in dockerfile if name == "USER")
    for pod in pods.values():
        security = pod["securityContext"]
        assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_service_accounts_have_no_token(manifests: list[Manifest], jobs: list[Manifest]) -> None:
    for objects in (manifests, jobs):
        service_account = _one(objects, "ServiceAccount")
        assert service_account["automountServiceAccountToken"] is False
        for pod in _pods(objects).values():
            assert pod["serviceAccountName"] == service_account["metadata"]["name"]


def test_secrets_are_referenced_only(
    manifests: list[Manifest], jobs: list[Manifest], pods: dict[str, Manifest], values: dict[str, str]
) -> None:
    assert not [manifest for manifest in [*manifests, *jobs] if manifest["kind"] == "Secret"]
    assert not values.keys() & settings.secret_names()
    for pod in pods.values():
        for name, reference in _secrets(pod).items():
            # The topics Job's Kafka user is another than the workers'.
            assert name in settings.secret_names() | {"KAFKA_SASL_USERNAME"}
            assert reference["key"] == name


def test_each_gets_the_secrets_it_needs_and_no_other(pods: dict[str, Manifest]) -> None:
    kafka = {"KAFKA_SASL_PASSWORD", "KAFKA_SSL_KEY_PASSWORD"}
    needed = {
        "migrate": {"DATABASE_ADMIN_CONNECTION_STRING"},
        "topics": kafka | {"KAFKA_SASL_USERNAME"},
        "worker": kafka | {"DATABASE_CONNECTION_STRING"},
        "embedder": kafka,
    }
    assert {name: set(_secrets(pod)) for name, pod in pods.items()} == {name: needed[name] for name in pods}
    # Each its own: whoever may read the workers' does not become the owner.
    owner = {name: f"anabranch-{name}" for name in pods} | {"migrate": "anabranch-owner"}
    for name, pod in pods.items():
        assert {reference["name"] for reference in _secrets(pod).values()} == {owner[name]}
        for volume in pod["volumes"]:
            if "secret" in volume:
                secret = volume["secret"]["secretName"]
                assert secret.startswith(f"{owner[name]}-") or (name, secret) == (
                    "embedder",
                    "anabranch-provider",
                )
        # A broker without passwords is no reason for a pod not to start.
        for variable, reference in _secrets(pod).items():
            assert reference.get("optional", False) == variable.startswith("KAFKA_")


def test_every_setting_is_in_the_config_map_or_a_secret(
    pods: dict[str, Manifest], settings_file: str
) -> None:
    named = re.findall(r"^(?:# )?([A-Z][A-Z0-9_]+)=", settings_file, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == settings.environment_names() - settings.secret_names()
    referenced = {name for pod in pods.values() for name in _secrets(pod)}
    assert referenced - {"KAFKA_SASL_USERNAME"} == settings.secret_names()


def test_settings_stand_at_their_defaults(settings_file: str) -> None:
    values = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", settings_file, re.MULTILINE))
    loaded, defaults = settings.load(values).model_dump(), settings.Settings().model_dump()
    differing = {name.upper() for name in defaults if loaded[name] != defaults[name]}
    assert differing == NO_DEFAULT
    # A commented setting is one without a default.
    unset = {name.upper() for name, default in defaults.items() if default is None}
    assert values.keys() == settings.environment_names() - unset


def test_every_process_accepts_its_settings(loaded: dict[str, Any], values: dict[str, str]) -> None:
    for name, of_process in loaded.items():
        # The policies that migrate writes are those that the workers rely on.
        assert of_process.anabranch_principals_setting == values["ANABRANCH_PRINCIPALS_SETTING"], name
        # And the tables' embeddings have as many dimensions as the workers'.
        dimensions = of_process.anabranch_embedding_dimensions
        assert dimensions == int(values["ANABRANCH_EMBEDDING_DIMENSIONS"]), name


def test_workers_and_jobs_have_the_same_settings(jobs: list[Manifest], values: dict[str, str]) -> None:
    assert _one(jobs, "ConfigMap")["data"] == values


def test_a_changed_setting_rolls_the_workers_and_changes_no_job(
    manifests: list[Manifest], jobs: list[Manifest], worker: Manifest
) -> None:
    name = _one(manifests, "ConfigMap", "anabranch")["metadata"]["name"]
    assert re.fullmatch(r"anabranch-[a-z0-9]{10}", name)
    assert _container(worker)["envFrom"] == [{"configMapRef": {"name": name}}]
    # A Job cannot be changed: it names the ConfigMap, which has the same name whatever is in it.
    assert _one(jobs, "ConfigMap")["metadata"]["name"] == "anabranch"
    assert _container(_pods(jobs)["topics"])["envFrom"] == [{"configMapRef": {"name": "anabranch"}}]
    references = {
        variable["valueFrom"]["configMapKeyRef"]["name"]
        for variable in _container(_pods(jobs)["migrate"])["env"]
        if "configMapKeyRef" in variable["valueFrom"]
    }
    assert references == {"anabranch"}


def test_jobs_are_named_after_their_release(jobs: list[Manifest]) -> None:
    """The next release's can be applied while these still exist."""
    for name in ("migrate", "topics"):
        job = _one(jobs, "Job", f"anabranch-{name}-{RELEASE}")
        assert job["metadata"]["labels"]["app.kubernetes.io/version"] == streams.__version__
        # A Job that Kubernetes deletes is created again by the next apply, and runs again.
        assert "ttlSecondsAfterFinished" not in job["spec"]


def test_settings_point_at_what_is_mounted(worker: Manifest, settings_file: str) -> None:
    mounts = {mount["mountPath"] for mount in _container(worker)["volumeMounts"]}
    paths = dict(re.findall(r"^# (\w+)=(/etc/anabranch/\S+)$", settings_file, re.MULTILINE))
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


def test_optional_volumes_are_optional(pods: dict[str, Manifest]) -> None:
    for pod in pods.values():
        for volume in pod["volumes"]:
            source = volume.get("secret") or volume.get("configMap")
            if source is not None:
                assert source["optional"] is True
            if "secret" in volume:
                assert source["defaultMode"] == 0o440


def test_rollout_needs_no_spare_partition(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            deployment = manifest["spec"]
            assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
            assert deployment["minReadySeconds"] > 0


def test_workers_are_spread_over_zones_and_nodes(
    manifests: list[Manifest], stages: dict[str, Manifest]
) -> None:
    for name, pod in stages.items():
        deployment = _one(manifests, "Deployment", f"anabranch-{name}")
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        constraints = pod["topologySpreadConstraints"]
        assert [constraint["topologyKey"] for constraint in constraints] == [
            "topology.kubernetes.io/zone",
            "kubernetes.io/hostname",
        ]
        for constraint in constraints:
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
            # A worker in the wrong place is better than none.
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
            assert constraint["matchLabelKeys"] == ["pod-template-hash"]


def test_number_of_workers(render_kubernetes: Render) -> None:
    replicas = {
        (overlay, manifest["metadata"]["name"]): manifest["spec"].get("replicas")
        for overlay in WORKERS
        for manifest in render_kubernetes(overlay)
        if manifest["kind"] == "Deployment"
    }
    assert replicas == {
        ("base", "anabranch-worker"): 2,
        ("overlays/dev", "anabranch-worker"): 1,
        # KEDA sets it in production.
        ("overlays/production", "anabranch-worker"): None,
        (WITH_EMBEDDER, "anabranch-worker"): None,
        (WITH_EMBEDDER, "anabranch-embedder"): 2,
    }


def test_selectors_find_their_pods_and_no_others(
    manifests: list[Manifest], jobs: list[Manifest], stages: dict[str, Manifest]
) -> None:
    labels = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in (*manifests, *jobs)
        if manifest["kind"] in {"Deployment", "Job"}
    }
    for stage in stages:
        name = f"anabranch-{stage}"
        for selector in (
            _one(manifests, "Deployment", name)["spec"]["selector"]["matchLabels"],
            _one(manifests, "PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
            _one(manifests, "Service", name)["spec"]["selector"],
        ):
            assert [found for found, of in labels.items() if selector.items() <= of.items()] == [name]


def test_disruption_budget_lets_nodes_be_drained(
    manifests: list[Manifest], stages: dict[str, Manifest]
) -> None:
    for stage in stages:
        budget = _one(manifests, "PodDisruptionBudget", f"anabranch-{stage}")["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_metrics_of_workers_that_are_not_ready_are_scraped(
    manifests: list[Manifest], stages: dict[str, Manifest]
) -> None:
    for stage, pod in stages.items():
        service = _one(manifests, "Service", f"anabranch-{stage}")["spec"]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"] is True
        (port,) = service["ports"]
        (container_port,) = _container(pod)["ports"]
        assert port["targetPort"] == container_port["name"]
        assert port["port"] == container_port["containerPort"]


def test_jobs_end(jobs: list[Manifest]) -> None:
    specs = [manifest["spec"] for manifest in jobs if manifest["kind"] == "Job"]
    assert len(specs) == 2
    for job in specs:
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert job["activeDeadlineSeconds"] > 0
        assert job["backoffLimit"] > 0
        # A drained node does not count as an attempt; Kubernetes takes the first rule that matches.
        assert job["podFailurePolicy"]["rules"][0] == {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }


def test_a_migration_that_needs_consent_fails_once(jobs: list[Manifest]) -> None:
    """With the exit code that `anabranch migrate` has for it."""
    job = _one(jobs, "Job", f"anabranch-migrate-{RELEASE}")["spec"]
    _, rule = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": container["name"],
            "operator": "In",
            "values": [NEEDS_CONSENT],
        },
    }


# The embedding stage


@pytest.fixture(scope="session")
def stage_file(root: Path) -> str:
    return (root / "k8s/components/embedder/settings.env").read_text()


def test_the_embedding_stage_is_there(render_kubernetes: Render) -> None:
    added = set(_names(render_kubernetes(WITH_EMBEDDER))) - set(
        _names(render_kubernetes("overlays/production"))
    )
    assert added == {
        ("ConfigMap", "anabranch-embedder-HASH"),
        *(
            (kind, "anabranch-embedder")
            for kind in ("Deployment", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Service")
        ),
    }


def test_every_setting_of_the_embedding_stage_stands_at_its_default(stage_file: str) -> None:
    embedding, embedder = settings.EmbeddingSettings, settings.EmbedderSettings
    own = settings.environment_names(embedding) | settings.environment_names(embedder)
    own -= settings.environment_names()
    named = re.findall(r"^(?:# )?([A-Z][A-Z0-9_]+)=", stage_file, re.MULTILINE)
    assert len(named) == len(set(named))
    shared = {"ANABRANCH_CONCURRENCY", "KAFKA_SASL_USERNAME"}
    files = {f"{name}_FILE" for name in EMBEDDING_SECRETS}
    assert set(named) == own - EMBEDDING_SECRETS | shared | files
    values = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", stage_file, re.MULTILINE))
    fields = {**embedding.model_fields, **embedder.model_fields}
    defaults = {name.upper(): field.default for name, field in fields.items()}
    assert values.keys() - shared == {name for name in own if defaults[name] is not None}
    required = {"ANABRANCH_EMBEDDING_PROVIDER": "openai", "ANABRANCH_EMBEDDING_MODEL": "any"}
    found = settings.load_embedding(values | required).model_dump()
    _, stage = settings.load_embedder(values | required)
    for name, value in (found | stage.model_dump()).items():
        assert name.upper() in required or value == defaults[name.upper()], name


def test_the_embedding_stage_accepts_its_settings(render_kubernetes: Render) -> None:
    manifests = render_kubernetes(WITH_EMBEDDER)
    pod = _pods(manifests)["embedder"]
    maps = [_one(manifests, "ConfigMap", name) for name in ("anabranch", "anabranch-embedder")]
    assert _container(pod)["envFrom"] == [
        {"configMapRef": {"name": each["metadata"]["name"]}} for each in maps
    ]
    environment = _environment_of_embedder(manifests)
    found = settings.load_embedding(environment)
    assert found.anabranch_embedding_model == environment["ANABRANCH_EMBEDDING_MODEL"]
    assert found.anabranch_embedding_api_key is not None
    stage, _ = settings.load_embedder(environment)
    assert (stage.anabranch_concurrency, stage.kafka_sasl_username) == (32, "retrieval-embedder")


def test_keys_of_providers_are_files_of_a_secret(render_kubernetes: Render, stage_file: str) -> None:
    pod = _pods(render_kubernetes(WITH_EMBEDDER))["embedder"]
    (mount,) = (each for each in _container(pod)["volumeMounts"] if each["name"] == "provider")
    assert mount["readOnly"] is True
    paths = re.findall(r"^# \w+_API_KEY_FILE=(\S+)$", stage_file, re.MULTILINE)
    assert [str(Path(path).parent) for path in paths] == [mount["mountPath"]] * 2
    environment = _one(render_kubernetes(WITH_EMBEDDER), "ConfigMap", "anabranch-embedder")["data"]
    assert environment["ANABRANCH_EMBEDDING_API_KEY_FILE"] in paths
