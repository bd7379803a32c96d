"""docker-compose.yml without Docker: each service's own command, environment and secrets, as processes of this machine.

Only what a container would have is replaced: host names and ports, the paths of secrets and mounted files, and the
entry point of our image.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ComposeProcesses", "secret"]

_SECRETS = "/run/secrets/"


def secret(compose: Mapping[str, Any], name: str) -> str:
    """A secret as the processes read it: without the end of its line."""
    return Path(compose["secrets"][name]["file"]).read_text().strip()


class ComposeProcesses:
    """Runs services.

    Args:
        compose: docker-compose.yml, as Compose understands it.
        folder: for the secrets, rewritten to the addresses here.
        addresses: host and port of a service (``kafka:19092``), and where it is here.
        programs: a folder with the programs of the images (psql).
    """

    def __init__(
        self,
        compose: Mapping[str, Any],
        root: Path,
        folder: Path,
        addresses: Mapping[str, str],
        programs: Path | None = None,
    ) -> None:
        self._compose = compose
        self._root = root
        self._folder = folder
        self._addresses = addresses
        self._programs = programs

    def run(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A one-shot service; `environment` overrides its own."""
        return subprocess.run(
            self.command(name),
            cwd=self._root,
            env=self.environment(name) | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, name: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """A service that stays, logging into a file."""
        with log.open("wb") as file:
            return subprocess.Popen(
                self.command(name),
                cwd=self._root,
                env=self.environment(name) | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def command(self, name: str) -> Sequence[str]:
        """What the container would run."""
        service = self._compose["services"][name]
        command = [*(service.get("entrypoint") or []), *(service.get("command") or [])]
        if service["image"].startswith("anabranch") and not service.get("entrypoint"):
            command = ["python", "-m", "streams", *command]
        return [sys.executable if part == "python" else self._mounted(service, part) for part in command]

    def environment(self, name: str) -> dict[str, str]:
        """What the process sees, and nothing of this machine but its programs."""
        service = self._compose["services"][name]
        given = {entry["source"] for entry in service.get("secrets", [])}
        environment = {"PATH": os.pathsep.join(filter(None, [str(self._programs or ""), os.environ["PATH"]]))}
        for variable, value in service["environment"].items():
            if value.startswith(_SECRETS):
                source = value.removeprefix(_SECRETS)
                assert source in given, f"{name} is not given the secret {source}"
                environment[variable] = str(self._secret(source))
            else:
                environment[variable] = self.here(value)
        if "PGHOST" in environment:
            environment["PGHOST"], environment["PGPORT"] = self.here(f"{environment['PGHOST']}:5432").split(
                ":"
            )
        return environment

    def here(self, text: str) -> str:
        """With the addresses of this machine."""
        for elsewhere, address in self._addresses.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(elsewhere)}\b", address, text)
        return text

    def _secret(self, name: str) -> Path:
        file = self._folder / name
        file.write_text(self.here(Path(self._compose["secrets"][name]["file"]).read_text()))
        return file

    def _mounted(self, service: Mapping[str, Any], path: str) -> str:
        for mount in service.get("volumes", []):
            if mount["type"] == "bind":
                path = path.replace(mount["target"], mount["source"])
        return path
