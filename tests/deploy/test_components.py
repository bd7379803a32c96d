"""k8s/components, and all of k8s/ against the schemas of Kubernetes and of the operators."""

import copy
import json
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from k8s.observability.rules import Parameters
from streams import settings
from streams.configured import required_topics
from tests.left_out import unavailable

Manifest = dict[str, Any]
Render = Callable[[str], list[Manifest]]
Conform = Callable[..., list[dict[str, str]]]

KUSTOMIZATIONS = (
    "base",
    "jobs",
    "overlays/dev",
    "overlays/dev/jobs",
    "overlays/production",
    "overlays/production/jobs",
    "overlays/production/kafka",
    "overlays/production-embedder",
    "overlays/production-embedder/jobs",
    "overlays/production-embedder/kafka",
)
# With everything that there is.
COMPLETE = KUSTOMIZATIONS[-3:]
# The oldest and the newest release that the manifests are meant for.
VERSIONS = ("1.31.0", "1.37.0")


# Schemas


def _closed(schema: Any) -> Any:
    """A schema of an operator that rejects unknown fields, as the API server does when it is strict."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if (
        isinstance(schema.get("properties"), dict)
        and "type" in schema
        and "additionalProperties" not in schema
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        closed["additionalProperties"] = False
    return closed


def _definitions(schema: Any, definitions: dict[str, Any], found: dict[str, Any]) -> Any:
    """The schema with references into itself; `found` collects what it refers to, directly or not."""
    if isinstance(schema, list):
        return [_definitions(part, definitions, found) for part in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: _definitions(part, definitions, found) for name, part in schema.items() if name != "$ref"}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in found:
            found[name] = None  # a definition may refer to itself
            found[name] = _definitions(definitions[name], definitions, found)
        own["$ref"] = f"#/definitions/{name}"
    return own


def _schema_name(manifest: Manifest) -> str:
    """As the files of Kubernetes' schemas are named."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    return "-".join(filter(None, [manifest["kind"].lower(), group.partition(".")[0], version]))


@pytest.fixture(scope="session")
def schemas(render_kubernetes: Render, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kubernetes' own, from the package kubernetes-validate, and the operators', from `crds/`."""
    folder = tmp_path_factory.mktemp("schemas")
    packaged = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    used = {_schema_name(manifest) for each in KUSTOMIZATIONS for manifest in render_kubernetes(each)}
    for version in VERSIONS:
        source = packaged / f"v{version}-local-strict"
        definitions = json.loads((source / "_definitions.json").read_text())["$defs"]
        (folder / f"v{version}").mkdir()
        for name in used:
            file = source / f"{name}.json"
            if file.is_file():
                found: dict[str, Any] = {}
                schema = _definitions(json.loads(file.read_text()), definitions, found)
                (folder / f"v{version}" / file.name).write_text(json.dumps(schema | {"definitions": found}))
    for file in (Path(__file__).parent / "crds").glob("*.yaml"):
        definition = yaml.safe_load(file.read_text())["spec"]
        for version in definition["versions"]:
            name = f"{definition['names']['kind'].lower()}-{definition['group']}-{version['name']}.json"
            schema = _closed(version["schema"]["openAPIV3Schema"])
            # These three are the API server's own.
            schema["properties"] |= {"metadata": {"type": "object"}}
            (folder / name).write_text(json.dumps(schema))
    return folder


@pytest.fixture(scope="session")
def conform(which: Callable[[str], str | None], schemas: Path) -> Conform:
    """What kubeconform finds wrong."""
    kubeconform = which("kubeconform") or unavailable(
        "kubeconform is not installed",
        enable="with Go: GOBIN=$PWD/.venv/bin go install github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0",
    )

    def run(manifests: list[Manifest], version: str = VERSIONS[-1]) -> list[dict[str, str]]:
        result = subprocess.run(
            [
                kubeconform,
                *("-strict", "-verbose", "-output", "json", "-kubernetes-version", version),
                *(
                    "-schema-location",
                    f"{schemas}/{{{{.NormalizedKubernetesVersion}}}}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
                ),
                *(
                    "-schema-location",
                    f"{schemas}/{{{{.ResourceKind}}}}-{{{{.Group}}}}-{{{{.ResourceAPIVersion}}}}.json",
                ),
            ],
            input=yaml.safe_dump_all(manifests),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        found = json.loads(result.stdout)["resources"]
        assert len(found) == len(manifests)
        return [resource for resource in found if resource["status"] != "statusValid"]

    return run


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS)
def test_valid_for_kubernetes_and_the_operators(
    render_kubernetes: Render, conform: Conform, kustomization: str, version: str
) -> None:
    assert conform(render_kubernetes(kustomization), version) == []


def test_every_kustomization_is_validated(root: Path) -> None:
    found = {
        file.parent.relative_to(root / "k8s").as_posix()
        for file in (root / "k8s").rglob("kustomization.yaml")
        if yaml.safe_load(file.read_text())["kind"] == "Kustomization"
    }
    assert found == set(KUSTOMIZATIONS)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "comand"), ["worker"]),
        ("Deployment", ("spec", "replicas"), "many"),
        ("NetworkPolicy", ("spec", "podselector"), {}),
        ("ScaledObject", ("spec", "maxReplicas"), 12),
        ("TriggerAuthentication", ("spec", "env", 0, "key"), "x"),
        ("PodMonitor", ("spec", "jobLabels"), "x"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "severity"), "page"),
        ("KafkaTopic", ("spec", "partition"), 12),
        ("KafkaTopic", ("apiVersion",), "kafka.strimzi.io/v1beta2"),
        ("KafkaUser", ("spec", "authorization", "acls", 0, "operations"), ["Raed"]),
    ],
)
def test_a_mistake_is_found(
    render_kubernetes: Render, conform: Conform, kind: str, path: tuple[Any, ...], value: object
) -> None:
    everything = [manifest for each in COMPLETE for manifest in render_kubernetes(each)]
    manifest = copy.deepcopy(next(manifest for manifest in everything if manifest["kind"] == kind))
    *parents, last = path
    target: Any = manifest
    for parent in parents:
        target = target[parent]
    target[last] = value
    assert [found["kind"] for found in conform([manifest])] == [kind]


def test_kube_score_finds_only_what_is_known(
    which: Callable[[str], str | None], render_kubernetes: Render, root: Path
) -> None:
    kube_score = which("kube-score") or unavailable(
        "kube-score is not installed",
        enable="with Go: GOBIN=$PWD/.venv/bin go install github.com/zegl/kube-score/cmd/kube-score@v1.20.0",
    )
    manifests = [manifest for each in COMPLETE for manifest in render_kubernetes(each)]
    result = subprocess.run(
        [
            kube_score,
            *("score", "-", "--output-format", "json"),
            *("--enable-optional-test", "container-seccomp-profile"),
            *("--enable-optional-test", "container-ports-check"),
        ],
        input=yaml.safe_dump_all(manifests),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found: dict[str, set[str]] = defaultdict(set)
    scored = json.loads(result.stdout)
    assert {one["type_meta"]["kind"] for one in scored} >= {"Deployment", "Job", "NetworkPolicy", "Service"}
    for one in scored:
        for check in one["checks"]:
            if not check["skipped"] and check["grade"] < 10:
                found[check["check"]["id"]].add(f"{one['type_meta']['kind']}/{one['object_meta']['name']}")
    known = tomllib.loads((root / "tests/deploy/kube-score.toml").read_text())
    assert found == {check: set(exception["objects"]) for check, exception in known.items()}
    assert all(exception["reason"].strip() for exception in known.values())


# Components


@pytest.fixture(scope="session")
def production(render_kubernetes: Render) -> Callable[..., Manifest]:
    """An object of the production overlay, the Jobs' and Kafka's included, by kind and name."""

    @cache
    def one(kind: str, name: str | None = None) -> Manifest:
        (found,) = (
            manifest
            for each in COMPLETE
            for manifest in render_kubernetes(each)
            if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
        )
        return found

    return one


@pytest.fixture(scope="session")
def pod(production: Callable[..., Manifest]) -> Manifest:
    """A worker's pod."""
    return dict(production("Deployment", "anabranch-worker")["spec"]["template"])


@pytest.fixture(scope="session")
def values(render_kubernetes: Render) -> dict[str, str]:
    """The workers' settings in production."""
    (found,) = (
        manifest["data"]
        for manifest in render_kubernetes("overlays/production")
        if manifest["kind"] == "ConfigMap"
    )
    return dict(found)


def _partitions(render_kubernetes: Render) -> int:
    (arguments,) = (
        manifest["spec"]["template"]["spec"]["containers"][0]["args"]
        for manifest in render_kubernetes("jobs")
        if manifest["kind"] == "Job" and "topics" in manifest["metadata"]["name"]
    )
    (partitions,) = re.findall(r"--partitions=(\d+)", " ".join(arguments))
    return int(partitions)


def test_keda_counts_what_the_workers_count(
    production: Callable[..., Manifest], values: dict[str, str], root: Path
) -> None:
    (trigger,) = production("ScaledObject")["spec"]["triggers"]
    assert trigger["type"] == "kafka"
    metadata = trigger["metadata"]
    assert {name: values[metadata[name]] for name in metadata if name.endswith("FromEnv")} == {
        "bootstrapServersFromEnv": values["KAFKA_BOOTSTRAP_SERVERS"],
        "consumerGroupFromEnv": values["ANABRANCH_CONSUMER_GROUP"],
        "topicFromEnv": values["ANABRANCH_INPUT_TOPIC"],
    }
    app = (root / "streams/worker/stage_app.py").read_text()
    assert f'consumer_auto_offset_reset="{metadata["offsetResetPolicy"]}"' in app
    # A stuck partition's lag would not count.
    assert "excludePersistentLag" not in metadata
    assert "allowIdleConsumers" not in metadata
    assert int(metadata["lagThreshold"]) > 0


def test_keda_wants_no_worker_without_a_partition(
    production: Callable[..., Manifest], render_kubernetes: Render
) -> None:
    scaled = production("ScaledObject")["spec"]
    assert scaled["maxReplicaCount"] == _partitions(render_kubernetes)
    assert 1 <= scaled["minReplicaCount"] <= scaled["fallback"]["replicas"]
    assert scaled["fallback"]["behavior"] == "currentReplicasIfHigher"
    deployment = production("Deployment", "anabranch-worker")
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]


def test_keda_logs_in_as_the_workers(
    production: Callable[..., Manifest], values: dict[str, str], pod: Manifest
) -> None:
    authentication = production("TriggerAuthentication")
    (trigger,) = production("ScaledObject")["spec"]["triggers"]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    assert values["KAFKA_SECURITY_PROTOCOL"] == "SASL_SSL"
    assert trigger["metadata"]["tls"] == "enable"
    assert trigger["metadata"]["sasl"] == values["KAFKA_SASL_MECHANISM"].lower().replace("-", "_").replace(
        "sha_", "sha"
    )
    (container,) = pod["spec"]["containers"]
    (username,) = authentication["spec"]["env"]
    assert username == {
        "parameter": "username",
        "name": "KAFKA_SASL_USERNAME",
        "containerName": container["name"],
    }
    assert username["name"] in values
    given = {
        (reference["name"], reference["key"])
        for variable in container["env"]
        if (reference := variable["valueFrom"].get("secretKeyRef"))
    }
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {
        mount["mountPath"]: volumes[mount["name"]]["secret"]["secretName"]
        for mount in container["volumeMounts"]
        if "secret" in volumes[mount["name"]]
    }
    authority = Path(values["KAFKA_SSL_CAFILE"])
    given.add((mounts[str(authority.parent)], authority.name))
    assert {(entry["name"], entry["key"]) for entry in authentication["spec"]["secretTargetRef"]} <= given


def test_strimzi_creates_the_topics_that_anabranch_would(
    render_kubernetes: Render, values: dict[str, str]
) -> None:
    topics = {
        manifest["metadata"]["name"]: manifest["spec"]
        for manifest in render_kubernetes("overlays/production-embedder/kafka")
        if manifest["kind"] == "KafkaTopic"
    }
    (own,) = (
        manifest["data"]
        for manifest in render_kubernetes("overlays/production-embedder")
        if manifest["metadata"]["name"].startswith("anabranch-embedder-")
    )
    values = {**values, "KAFKA_SASL_PASSWORD": "a secret"}
    names = ("ANABRANCH_TEXT_TOPIC", "ANABRANCH_TEXT_DEAD_LETTER_TOPIC")
    stage, _ = settings.load_embedder(values | {name: own[name] for name in names})
    specs = required_topics(
        settings.load(values),
        stage,
        partitions=_partitions(render_kubernetes),
        replication_factor=3,
        max_event_bytes=1024 * 1024,
    )
    assert topics.keys() == {spec.name for spec in specs}
    for spec in specs:
        found = topics[spec.name]
        assert (found["partitions"], found["replicas"]) == (spec.partitions, spec.replication_factor)
        config = {name: str(value) for name, value in found["config"].items()}
        # One broker may fail, and every record still has two copies.
        assert config.pop("min.insync.replicas") == "2"
        assert config == dict(spec.config)


def test_kafka_users_name_what_exists(render_kubernetes: Render, values: dict[str, str]) -> None:
    """What they may do is tested on a broker: test_kafka_users.py."""
    manifests = render_kubernetes("overlays/production-embedder/kafka")
    topics = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "KafkaTopic"}
    users = [manifest for manifest in manifests if manifest["kind"] == "KafkaUser"]
    assert values["KAFKA_SASL_USERNAME"] in {user["metadata"]["name"] for user in users}
    for user in users:
        # Strimzi writes a Secret of the user's name: in one namespace, it would replace ours.
        assert not user["metadata"]["name"].startswith("anabranch")
        for rule in user["spec"]["authorization"]["acls"]:
            assert rule["resource"]["type"] in ("topic", "group")
            if rule["resource"]["type"] == "topic":
                assert rule["resource"]["patternType"] == "literal"
                assert rule["resource"]["name"] in topics
    assert {manifest["metadata"]["labels"]["strimzi.io/cluster"] for manifest in manifests} == {"kafka"}
    assert {manifest["apiVersion"] for manifest in manifests} == {"kafka.strimzi.io/v1"}


@pytest.mark.parametrize(
    ("stage", "job"), [("worker", Parameters().jobs), ("embedder", Parameters().embedder_jobs)]
)
def test_prometheus_operator_scrapes_each_stage_as_the_rules_expect(
    production: Callable[..., Manifest], root: Path, stage: str, job: str
) -> None:
    pod = production("Deployment", f"anabranch-{stage}")["spec"]["template"]
    monitor = production("PodMonitor", f"anabranch-{stage}")["spec"]
    labels = pod["metadata"]["labels"]
    assert labels[monitor["jobLabel"]] == job
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    (container,) = pod["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    prometheus = yaml.safe_load((root / "k8s/observability/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert labels[monitor["jobLabel"]] in jobs
    assert endpoint["path"] == jobs[labels[monitor["jobLabel"]]]["metrics_path"]
    assert endpoint["interval"] == prometheus["global"]["scrape_interval"]


def test_the_prometheus_rule_is_the_rule_file(root: Path, run: Callable[..., Any]) -> None:
    """Where this fails, `make k8s-rules` has been forgotten."""
    folder = root / "k8s/components/prometheusrule"
    made = run([str(folder / "generate")])
    assert made.returncode == 0, made.stderr
    assert made.stdout == (folder / "prometheusrule.yaml").read_text()
    rules = yaml.safe_load((root / "k8s/observability/prometheus/rules.yml").read_text())
    assert yaml.safe_load(made.stdout)["spec"] == rules
    assert re.search(
        r"^k8s-rules:.*\n\tk8s/components/prometheusrule/generate > \S+\n",
        (root / "Makefile").read_text(),
        re.MULTILINE,
    )


def _ports(rules: list[Manifest]) -> set[int]:
    return {
        port
        for rule in rules
        for entry in rule["ports"]
        for port in range(entry["port"], entry.get("endPort", entry["port"]) + 1)
    }


@pytest.mark.parametrize(
    # No web for a worker: what it reads cannot be sent away. No database for the embedding stage.
    ("stage", "needed", "refused"),
    [("worker", {53, 5432}, {80, 443}), ("embedder", {53, 443}, {80, 5432, 6432})],
)
def test_each_stage_is_reached_by_prometheus_alone(
    production: Callable[..., Manifest],
    values: dict[str, str],
    *,
    stage: str,
    needed: set[int],
    refused: set[int],
) -> None:
    pod = production("Deployment", f"anabranch-{stage}")["spec"]["template"]
    policy = production("NetworkPolicy", f"anabranch-{stage}")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (ingress,) = policy["ingress"]
    (container,) = pod["spec"]["containers"]
    assert [port["port"] for port in ingress["ports"]] == [port["name"] for port in container["ports"]]
    assert ingress["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    reached = _ports(policy["egress"])
    brokers = {int(address.rpartition(":")[2]) for address in values["KAFKA_BOOTSTRAP_SERVERS"].split(",")}
    assert brokers | needed <= reached
    assert not reached & refused


@pytest.mark.parametrize(("name", "needed", "not_needed"), [("migrate", 5432, 9092), ("topics", 9093, 5432)])
def test_jobs_are_reached_by_nobody(
    production: Callable[..., Manifest],
    render_kubernetes: Render,
    name: str,
    needed: int,
    not_needed: int,
) -> None:
    policy = production("NetworkPolicy", f"anabranch-{name}")["spec"]
    (labels,) = (
        manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in render_kubernetes("overlays/production/jobs")
        if manifest["kind"] == "Job" and name in manifest["metadata"]["name"]
    )
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in policy
    reached = _ports(policy["egress"])
    assert {53, needed} <= reached
    assert not_needed not in reached


# Instructions


@pytest.fixture
def wait(root: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs k8s/wait-for-jobs with a `kubectl` that answers with these conditions, one after another, for each Job."""

    def run(**conditions: list[str]) -> subprocess.CompletedProcess[str]:
        for job, answers in conditions.items():
            (tmp_path / job).write_text("".join(f"{answer}\n" for answer in answers))
        kubectl = tmp_path / "kubectl"
        kubectl.write_text(
            "#!/bin/sh\n"
            f'echo "$*" >> {tmp_path}/calls\n'
            'if [ "$3" = logs ]; then echo "log of $5"; exit; fi\n'
            f'head -1 "{tmp_path}/$5"; sed -i 1d "{tmp_path}/$5"\n'
        )
        kubectl.chmod(0o755)
        return subprocess.run(
            [root / "k8s/wait-for-jobs", "retrieval", *conditions],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "INTERVAL_SECONDS": "0"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


def test_waiting_ends_with_success(wait: Callable[..., Any], tmp_path: Path) -> None:
    done = wait(migrate=["", "", "SuccessCriteriaMet Complete"], topics=["Complete"])
    assert (done.returncode, done.stdout) == (0, "migrate: complete\ntopics: complete\n")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4
    assert all(call.startswith("--namespace retrieval get job ") for call in calls)


def test_waiting_ends_with_failure(wait: Callable[..., Any]) -> None:
    """Which `kubectl wait --for=condition=complete` does not notice."""
    done = wait(migrate=["", "FailureTarget", "FailureTarget Failed"], topics=["Complete"])
    assert done.returncode == 1
    assert done.stdout == ("migrate: failed\nlog of batch.kubernetes.io/job-name=migrate\ntopics: complete\n")


def test_the_readme_names_what_exists(root: Path, render_kubernetes: Render) -> None:
    readme = (root / "k8s/README.md").read_text()
    for secret in settings.secret_names():
        assert f"`{secret}`" in readme
    for path in re.findall(r"k8s/[\w./-]+\w", readme):
        assert (root / path).exists(), path
    contents = readme.partition("\n\nThe manifests do not")[0]
    for path in re.findall(r"^\| `([^`]+)` \|", contents, re.MULTILINE):
        assert (root / "k8s" / path).exists(), path
    for folder in [*(root / "k8s/components").iterdir(), *(root / "k8s/overlays").iterdir()]:
        assert f"`{folder.parent.name}/{folder.name}" in readme, folder
    jobs = {
        manifest["metadata"]["name"] for manifest in render_kubernetes("jobs") if manifest["kind"] == "Job"
    }
    release = re.search(r"^release=(\S+)$", readme, re.MULTILINE)
    assert release is not None
    named = {name.replace("$release", release[1]) for name in re.findall(r"anabranch-\w+-\$release", readme)}
    assert named == jobs
