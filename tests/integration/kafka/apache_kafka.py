"""Apache Kafka as users run it, on this machine: brokers in KRaft mode, from the jars that Maven resolves.

With certificates a broker has a listener of each kind beside the plain one, and users who may log in.
"""

import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.certificates import Certificates
from tests.integration.maven import Unresolved, resolved

__all__ = [
    "MECHANISMS",
    "PASSWORD",
    "USER",
    "ApacheKafka",
    "KafkaCluster",
    "KafkaUnavailable",
    "NodePorts",
    "free_ports",
    "jars",
]

# The newest release whose artifacts are all to be had (4.4.0 lacks one); it runs on Java 17.
VERSION: Final = "4.3.1"
_SLF4J: Final = "1.7.36"  # what Kafka's jars are built with
_LEAST_JAVA: Final = 17

_START_SECONDS = 60
_STOP_SECONDS = 30
_ATTEMPTS_TO_FIND_PORTS = 3
_PORTS: Final = (15_000, 32_000)

# Who may log in where SASL is asked, by every mechanism.
USER: Final = "worker=anabranch"  # with a character that SCRAM escapes
PASSWORD: Final = "canary-of-kafka %2C;:/?#@"
MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")

# Beside the plain listener: name, protocol, and what it shows its clients.
_LISTENERS: Final = {
    "SSL": "SSL",
    "SASL_SSL": "SASL_SSL",
    "SASL_PLAINTEXT": "SASL_PLAINTEXT",
    "MUTUAL": "SSL",  # asks clients for a certificate
    "EXPIRED": "SSL",  # its certificate ended an hour ago
    "ELSEWHERE": "SSL",  # its certificate is another host's
}

_PROPERTIES = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},{others}CONTROLLER://127.0.0.1:{controller_port}{proxy_listener}
advertised.listeners={others}PLAINTEXT://127.0.0.1:{port}{advertised_proxy_port}
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor={copies}
offsets.topic.num.partitions=5
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={in_sync}
min.insync.replicas={in_sync}
group.initial.rebalance.delay.ms=0
# A broker that was killed may not register again before its session has ended; 9 s otherwise.
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
"""
# Any 16 bytes in base64; nobody else's cluster is near.
_CLUSTER_ID = "AnabranchTestCluster0g"
_STARTED = "Kafka Server started"
_JVM = (
    # Compiles little and collects on one core: up in half the time, and the cores are shared.
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xms128m",
    "-Xmx512m",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",  # says when it is up
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)


class KafkaUnavailable(Exception):
    """Java, Maven or the jars cannot be had here; the message says which, and why."""


@dataclass(frozen=True)
class NodePorts:
    """One broker's id and ports in a cluster: all ports are known before any broker starts.

    Attributes:
        proxy_listener: a second port for clients, the listener ``PROXY``; 0: none.
        advertised_proxy_port: what it advertises to clients: a proxy's port.
    """

    node: int
    port: int
    controller_port: int
    proxy_listener: int = 0
    advertised_proxy_port: int = 0


class ApacheKafka:
    """One broker, which is a controller too, on ports of this machine.

    Its records outlive its process: `stop` and `start` again, on the same ports and data.

    Args:
        jars: the folder that `jars` returned.
        certificates: opens the listeners beside the plain one.
        node_ports: its entry among the ``voters``; None: alone, on ports of its own.
        voters: all brokers of the cluster.
        settings: of the broker, over those here.
        data: where the records are kept; None: beside the log.
    """

    def __init__(
        self,
        jars: Path,
        certificates: Certificates | None = None,
        *,
        node_ports: NodePorts | None = None,
        voters: Sequence[NodePorts] = (),
        settings: Mapping[str, str] | None = None,
        data: Path | None = None,
    ) -> None:
        self._jars = jars
        self._certificates = certificates
        self._listeners: dict[str, int] = {}
        self._given_ports = node_ports
        self._voters = voters
        self._settings = dict(settings or {})
        self._given_data = data
        self._resources = ExitStack()
        self._folder: Path | None = None
        self._node_ports = node_ports or NodePorts(1, 0, 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_began = 0

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self._node_ports.port}"

    @property
    def node_ports(self) -> NodePorts:
        return self._node_ports

    def listener(self, name: str) -> str:
        """Where one of the other listeners is."""
        return f"127.0.0.1:{self._listeners[name]}"

    @property
    def pid(self) -> int:
        """Process id of the broker."""
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Warnings and errors, over all its lives."""
        return "" if self._folder is None else self._log_file.read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            for attempt in range(_ATTEMPTS_TO_FIND_PORTS):
                self.prepare()
                try:
                    self.start()
                except AssertionError:
                    # Somebody may have taken a port between the look and the start.
                    if attempt == _ATTEMPTS_TO_FIND_PORTS - 1 or "already in use" not in self.log:
                        raise
                else:
                    break
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def prepare(self) -> None:
        """Its folder, its ports where none were given, and an empty data directory."""
        if self._folder is None:
            self._folder = Path(
                self._resources.enter_context(
                    tempfile.TemporaryDirectory(prefix="anabranch-kafka-", ignore_cleanup_errors=True)
                )
            )
        if self._given_ports is None:
            self._node_ports = NodePorts(1, *free_ports(2))
        self._format(self._folder)

    def close(self) -> None:
        self.stop(kill=True)  # nobody needs the data any more
        self._resources.close()

    def start(self) -> float:
        """Starts it and waits until it serves; returns how many seconds that took."""
        began = time.monotonic()
        self.launch()
        self.wait_until_up()
        return time.monotonic() - began

    def launch(self) -> None:
        """Starts it. In a cluster it is not up before most of the others are there."""
        assert not self.is_running
        assert self._folder is not None, "use it as a context manager"
        with self._log_file.open("ab") as log:
            self._log_began = log.tell()
            self._process = subprocess.Popen(
                self._java("kafka.Kafka", str(self._folder / "server.properties")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )

    def wait_until_up(self) -> None:
        """Waits until it serves."""
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while _STARTED.encode() not in self._log_file.read_bytes()[self._log_began :]:
            ended, late = self._process.poll() is not None, time.monotonic() > deadline
            if ended or late:
                self.stop(kill=True)
                raise AssertionError(f"Apache Kafka {'ended' if ended else 'is not up'}:\n{self.log[-4000:]}")
            time.sleep(0.05)

    def stop(self, *, kill: bool = False) -> None:
        """Ends it: with SIGTERM, so that it says goodbye to its clients and closes its logs; or with kill -9."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def restart(self, *, kill: bool = False) -> float:
        """Ends it and starts it again on the same ports and data; returns how many seconds the start took."""
        self.stop(kill=kill)
        return self.start()

    def set_password(self, password: str) -> None:
        """Gives `USER` another password for SCRAM; who is logged in stays so."""
        for mechanism in MECHANISMS:
            if mechanism.startswith("SCRAM"):
                self.tool(
                    "kafka.admin.ConfigCommand",
                    *("--bootstrap-server", self.bootstrap_servers, "--alter"),
                    *("--entity-type", "users", "--entity-name", USER),
                    *("--add-config", f"{mechanism}=[password={password}]"),
                )

    @property
    def _log_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "broker.log"

    def _format(self, folder: Path) -> None:
        """The settings, and an empty data directory."""
        data = self._given_data or folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(exist_ok=True)
        names = () if self._certificates is None else tuple(_LISTENERS)
        self._listeners = dict(zip(names, free_ports(len(names)), strict=True))
        ports = self._node_ports
        voters = self._voters or [ports]
        properties = folder / "server.properties"
        text = _PROPERTIES.format(
            node=ports.node,
            port=ports.port,
            controller_port=ports.controller_port,
            voters=",".join(f"{voter.node}@127.0.0.1:{voter.controller_port}" for voter in voters),
            proxy_listener=f",PROXY://127.0.0.1:{ports.proxy_listener}" if ports.proxy_listener else "",
            advertised_proxy_port=f",PROXY://127.0.0.1:{ports.advertised_proxy_port}"
            if ports.proxy_listener
            else "",
            copies=min(3, len(voters)),
            in_sync=2 if len(voters) > 2 else 1,
            others="".join(f"{name}://{self.listener(name)}," for name in names),
            data=data.as_posix(),
        )
        settings = [*self._security(), *(f"{name}={value}" for name, value in self._settings.items())]
        # Of two lines with one name the later one counts.
        properties.write_text(text + "\n".join(settings))
        scrams = [name for name in MECHANISMS if name.startswith("SCRAM") and names]
        users = [part for name in scrams for part in ("-S", f'{name}=[name="{USER}",password="{PASSWORD}"]')]
        self.tool("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(properties), *users)

    def tool(self, main: str, *arguments: str) -> str:
        """Runs one of Kafka's own commands; returns what it says."""
        done = subprocess.run(
            self._java(main, *arguments),
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            cwd=self._folder,
            check=False,
        )
        assert done.returncode == 0, f"{main}: {done.stdout}{done.stderr}"
        return done.stdout

    def _security(self) -> Iterator[str]:
        """The properties of the other listeners."""
        if self._certificates is None:
            return
        kinds = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"} | _LISTENERS
        yield "listener.security.protocol.map=" + ",".join(f"{name}:{kind}" for name, kind in kinds.items())
        shown = {
            "EXPIRED": self._certificates.server(expired=True),
            "ELSEWHERE": self._certificates.server("broker.example.org"),
        }
        ours = self._certificates.server()
        for name, kind in _LISTENERS.items():
            of = f"listener.name.{name.lower()}"
            if "SSL" in kind:
                yield f"{of}.ssl.keystore.type=PEM"
                yield f"{of}.ssl.keystore.location={shown.get(name, ours).both}"
                yield f"{of}.ssl.truststore.type=PEM"
                yield f"{of}.ssl.truststore.location={self._certificates.authority}"
                yield f"{of}.ssl.client.auth={'required' if name == 'MUTUAL' else 'none'}"
            if "SASL" in kind:
                yield f"{of}.sasl.enabled.mechanisms={','.join(MECHANISMS)}"
                plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
                scram = "org.apache.kafka.common.security.scram.ScramLoginModule"
                yield f'{of}.plain.sasl.jaas.config={plain} required "user_{USER}"="{PASSWORD}";'
                yield f"{of}.scram-sha-256.sasl.jaas.config={scram} required;"
                yield f"{of}.scram-sha-512.sasl.jaas.config={scram} required;"

    def _java(self, *arguments: str) -> Sequence[str]:
        return ["java", *_JVM, "-cp", f"{self._jars}/*", *arguments]


class KafkaCluster:
    """Brokers that replicate: with three of them three copies, of which two must be in sync.

    Args:
        jars: the folder that `jars` returned.
        brokers: how many.
        settings: of every broker, over those here.
        proxy_ports: for each broker the port of a proxy before it.
        data: where the first keeps its records; None: beside its log.
    """

    def __init__(
        self,
        jars: Path,
        *,
        brokers: int,
        settings: Mapping[str, str] | None = None,
        proxy_ports: Sequence[int] = (),
        data: Path | None = None,
    ) -> None:
        ports = iter(free_ports(3 * brokers))
        all_ports = [
            NodePorts(
                node, next(ports), next(ports), *((next(ports), proxy_ports[node - 1]) if proxy_ports else ())
            )
            for node in range(1, brokers + 1)
        ]
        self.brokers = [
            ApacheKafka(
                jars,
                node_ports=node_ports,
                voters=all_ports,
                settings=settings,
                data=data if node_ports.node == 1 else None,
            )
            for node_ports in all_ports
        ]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.bootstrap_servers for broker in self.brokers)

    @property
    def copies(self) -> int:
        """Replication factor of its topics."""
        return min(3, len(self.brokers))

    def __enter__(self) -> Self:
        try:
            for broker in self.brokers:
                broker.prepare()
            for broker in self.brokers:
                broker.launch()
            for broker in self.brokers:
                broker.wait_until_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for broker in self.brokers:
            broker.close()


def jars() -> Path:
    """The folder that holds Kafka's jars; resolved with Maven where nobody has done so yet.

    Raises:
        KafkaUnavailable: Java is missing or too old, Maven is missing, or it cannot resolve them.
    """
    _look_for_java()
    try:
        return resolved(
            f"kafka-{VERSION}",
            [("org.apache.kafka", "kafka_2.13", VERSION), ("org.slf4j", "slf4j-simple", _SLF4J)],
        )
    except Unresolved as error:
        raise KafkaUnavailable(str(error)) from None


def _look_for_java() -> None:
    java = shutil.which("java")
    if java is None:
        raise KafkaUnavailable("Java is not installed; Apache Kafka needs 17 or newer")
    done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r'version "(\d+)', done.stderr)
    if found is None or int(found[1]) < _LEAST_JAVA:
        raise KafkaUnavailable(
            f"Apache Kafka needs Java {_LEAST_JAVA} or newer; here: {done.stderr.splitlines()[:1]}"
        )


def free_ports(count: int) -> list[int]:
    """Ports of this machine that differ, for servers that are stopped and started again.

    Below those that the system gives to clients: a client that keeps knocking at the port of a stopped server may be
    given that very port itself, and then it is taken, by a connection from itself to itself.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
