"""Apache Kafka as users run it, on this machine: one broker in KRaft mode, from the jars that Maven resolves.

With certificates it has a listener of each kind beside the plain one, and users who may log in.
"""

import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from certificates import Certificates
from maven import Unresolved, resolved

__all__ = ["MECHANISMS", "PASSWORD", "USER", "ApacheKafka", "KafkaUnavailable", "jars"]

# The newest release whose artifacts are all to be had (4.4.0 lacks one); it runs on Java 17.
VERSION: Final = "4.3.1"
_SLF4J: Final = "1.7.36"  # what Kafka's jars are built with
_LEAST_JAVA: Final = 17

_START_SECONDS = 60
_STOP_SECONDS = 30
_ATTEMPTS_TO_FIND_PORTS = 3

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
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},{others}CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners={others}PLAINTEXT://127.0.0.1:{port}
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=5
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
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


class ApacheKafka:
    """One broker, which is its own controller, on two ports of this machine.

    Its records outlive its process: `stop` and `start` again, on the same ports and data.

    Args:
        jars: the folder that `jars` returned.
        certificates: opens the listeners beside the plain one.
    """

    def __init__(self, jars: Path, certificates: Certificates | None = None) -> None:
        self._jars = jars
        self._certificates = certificates
        self._listeners: dict[str, int] = {}
        self._resources = ExitStack()
        self._folder: Path | None = None
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self._port}"

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
        self._folder = Path(
            self._resources.enter_context(
                tempfile.TemporaryDirectory(prefix="anabranch-kafka-", ignore_cleanup_errors=True)
            )
        )
        try:
            for attempt in range(_ATTEMPTS_TO_FIND_PORTS):
                self._format()
                try:
                    self.start()
                except AssertionError:
                    # Somebody may have taken a port between the look and the start.
                    if attempt == _ATTEMPTS_TO_FIND_PORTS - 1 or "already in use" not in self.log:
                        raise
                else:
                    break
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.stop(kill=True)  # nobody needs the data any more
        self._resources.close()

    def start(self) -> float:
        """Starts it and waits until it serves; returns how many seconds that took."""
        assert not self.is_running
        assert self._folder is not None, "use it as a context manager"
        began = time.monotonic()
        with self._log_file.open("ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(
                self._java("kafka.Kafka", str(self._folder / "server.properties")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )
        while _STARTED.encode() not in self._log_file.read_bytes()[before:]:
            ended, late = self._process.poll() is not None, time.monotonic() - began > _START_SECONDS
            if ended or late:
                self.stop(kill=True)
                raise AssertionError(f"Apache Kafka {'ended' if ended else 'is not up'}:\n{self.log[-4000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

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
                self._tool(
                    "kafka.admin.ConfigCommand",
                    *("--bootstrap-server", self.bootstrap_servers, "--alter"),
                    *("--entity-type", "users", "--entity-name", USER),
                    *("--add-config", f"{mechanism}=[password={password}]"),
                )

    @property
    def _log_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "broker.log"

    def _format(self) -> None:
        """New ports and an empty data directory."""
        assert self._folder is not None
        names = () if self._certificates is None else tuple(_LISTENERS)
        self._port, controller_port, *ports = _free_ports(2 + len(names))
        self._listeners = dict(zip(names, ports, strict=True))
        data = self._folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        properties = self._folder / "server.properties"
        others = "".join(f"{name}://{self.listener(name)}," for name in names)
        properties.write_text(
            _PROPERTIES.format(
                port=self._port, controller_port=controller_port, data=data.as_posix(), others=others
            )
            + "\n".join(self._security())
        )
        scrams = [name for name in MECHANISMS if name.startswith("SCRAM") and names]
        users = [part for name in scrams for part in ("-S", f'{name}=[name="{USER}",password="{PASSWORD}"]')]
        self._tool("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(properties), *users)

    def _tool(self, *arguments: str) -> None:
        """Runs one of Kafka's own."""
        done = subprocess.run(
            self._java(*arguments),
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            cwd=self._folder,
            check=False,
        )
        assert done.returncode == 0, f"{arguments[0]} failed:\n{done.stdout}{done.stderr}"

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


def _free_ports(count: int) -> list[int]:
    """Looked for together, so that they differ."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
