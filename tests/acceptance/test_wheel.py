"""The wheel carries what it needs: installed alone, away from the checkout, every command works.

From questions in words to passages, too: beside the demo's servers, with documents of one's own. The tutorial's
commands and programs run there as they are printed.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.acceptance.kept_demo import KeptDemo, kept_demo
from tests.acceptance.tutorial import comparable, read_tutorial, run_commands
from tests.conftest import MODEL
from tests.embedding.imitation import imitation
from tests.integration.harness import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the built wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: the build leaves nothing in the checkout, and takes nothing that git does not know.
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout
    assert tracked, "this test builds what git tracks"
    source = folder / "source"
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", source],
        check=True,
        capture_output=True,
        text=True,
    )
    [wheel] = (folder / "dist").glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel],
        check=True,
    )
    # The dependencies are this environment's; the checkout itself must not come along with them.
    here = Path(next(path for path in sys.path if path.endswith("site-packages")))
    [there] = (folder / "venv/lib").glob("python*/site-packages")
    for entry in here.iterdir():
        if "anabranch" not in entry.name and not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)
    return folder / "venv/bin/anabranch"


def run(command: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command, *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_it_is_the_wheel_that_runs(installed: Path) -> None:
    where = subprocess.run(
        [installed.parent / "python", "-I", "-c", "import streams; print(streams.__file__)"],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(installed.parents[1]))


def test_every_command_has_help(installed: Path) -> None:
    reported = run(installed, "--help")
    assert reported.returncode == 0, reported.stderr
    commands = re.findall(r"^  (\w+)  ", reported.stdout.split("Commands:")[1], re.MULTILINE)
    assert {"worker", "demo", "migrate", "topics", "check", "contract", "publish", "tail"} <= set(commands)
    for command in commands:
        ended = run(installed, command, "--help")
        assert ended.returncode == 0, ended.stderr


def test_the_contracts_and_schemas_are_there(installed: Path, tmp_path: Path) -> None:
    ended = run(installed, "contract", "derive", "--check")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert run(installed, "contract", "compatible").returncode == 0
    shown = json.loads(run(installed, "contract", "show", "query_embedding@1.0.0").stdout)
    assert (shown["json_schema"]["title"], shown["avro_schema"]["name"]) == (
        "QueryEmbedding",
        "QueryEmbedding",
    )
    assert run(installed, "contract", "export", str(tmp_path)).returncode == 0
    assert json.loads((tmp_path / "fingerprints.json").read_text())


def test_the_description_links_to_pages_that_exist(installed: Path) -> None:
    """On a package index, a relative link would lead nowhere."""
    [metadata] = installed.parents[1].glob("lib/python*/site-packages/anabranch-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    [site] = re.findall(r"^Project-URL: Documentation, (.*)docs/$", text, re.MULTILINE)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 40
    for link in links:
        page = link.removeprefix(site).partition("#")[0]
        assert (ROOT / re.sub(r"\.html$", ".md", page)).is_file(), link


def test_schemas_are_derived_only_in_a_checkout(installed: Path) -> None:
    ended = run(installed, "contract", "derive")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "anabranch contract derive: schemas are derived in a checkout, not in an installed package; run `make schemas`"
        " there\n"
    )


@pytest.mark.parametrize("command", ["worker", "check"])
def test_without_a_store_there_is_one_clear_line(installed: Path, command: str) -> None:
    ended = run(installed, command)
    assert ended.returncode == 2
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"anabranch {command}: DATABASE_CONNECTION_STRING is not set")


def test_without_a_server_there_is_one_clear_line_and_no_secret(installed: Path) -> None:
    nobody = "postgresql://owner:very-secret@127.0.0.1:1/app"
    for command, environment in {
        "migrate": {"DATABASE_ADMIN_CONNECTION_STRING": nobody},
        "topics": {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"},
    }.items():
        ended = run(installed, command, **environment)
        assert ended.returncode == 1
        [line] = ended.stderr.splitlines()
        assert line.startswith(f"anabranch {command}: ")
        assert "very-secret" not in ended.stdout + ended.stderr
    ended = run(installed, "check", DATABASE_CONNECTION_STRING=nobody, KAFKA_BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert ended.returncode == 1
    assert "cannot connect to PostgreSQL" in ended.stdout
    assert re.search(r"^passed +codecs$", ended.stdout, re.MULTILINE)
    assert "KAFKA_BOOTSTRAP_SERVERS" in ended.stdout
    assert "very-secret" not in ended.stdout + ended.stderr


# Beside the demo


@dataclass(frozen=True)
class Terminal:
    """Where a user types, in an empty folder.

    Attributes:
        environment: what was exported there.
    """

    command: Path
    folder: Path
    environment: Mapping[str, str]

    def __call__(
        self,
        *arguments: str,
        given: Sequence[Mapping[str, Any]] = (),
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """What a command prints; it must succeed. Its input is one JSON object per line."""
        ended = subprocess.run(
            [self.command, *arguments],
            env={**self.environment, **(environment or {})},
            cwd=self.folder,
            input="".join(f"{json.dumps(line)}\n" for line in given),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, f"{arguments}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    @contextmanager
    def running(self, command: str, **environment: str) -> Iterator[None]:
        """A process that stays; SIGTERM ends it in order."""
        log = self.folder / f"{command}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [self.command, command],
                env={**self.environment, "ANABRANCH_WEB_PORT": str(free_port()), **environment},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        try:
            yield
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            print(f"--- {command} ---\n{log.read_text()[-3000:]}")

    def answer(self, event_id: str) -> dict[str, Any]:
        """The result of an event, as `anabranch tail` shows it."""
        tail = subprocess.Popen(
            [self.command, "tail", "--from-beginning"],
            env=dict(self.environment),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        timer = threading.Timer(90, tail.kill)
        timer.start()
        try:
            assert tail.stdout is not None
            for line in tail.stdout:
                result: dict[str, Any] = json.loads(line)
                if result["event_id"] == event_id:
                    return result
            raise AssertionError("the question was not answered")
        finally:
            timer.cancel()
            tail.kill()
            tail.communicate()


def local_model(folder: Path = MODEL) -> dict[str, str]:
    """Settings for the model with which the sample was embedded; empty without it."""
    return (
        {
            "ANABRANCH_EMBEDDING_PROVIDER": "local",
            "ANABRANCH_EMBEDDING_MODEL": "sentence-transformers/all-mpnet-base-v2",
            "ANABRANCH_EMBEDDING_PATH": str(folder),
        }
        if (folder / "tokenizer.json").is_file()
        else {}
    )


@pytest.fixture(scope="module")
def demo(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptDemo]:
    folder = tmp_path_factory.mktemp("empty")
    environment = {"PATH": os.environ["PATH"], "COLUMNS": "100"}
    with kept_demo(installed, folder, environment, settings=local_model()) as kept:
        yield kept


def exports_of(demo: KeptDemo) -> dict[str, str]:
    """The variables that the demo's lines set."""
    lines = [shlex.split(line) for line in demo.output.splitlines() if line.startswith("export ")]
    return dict(line[1].split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def terminal(installed: Path, demo: KeptDemo, tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    """Another terminal, into which the demo's lines have been pasted, except those about its model."""
    exports = {name: value for name, value in exports_of(demo).items() if "_EMBEDDING_" not in name}
    return Terminal(installed, tmp_path_factory.mktemp("own"), {"PATH": os.environ["PATH"]} | exports)


DOCUMENTS: Final[Mapping[int, Any]] = {
    number: {
        "id": str(UUID(int=number)),
        "title": f"Note {number}",
        "grants": ["user:me"],
        "chunks": [{"text_content": text}],
    }
    for number, text in enumerate(
        [
            "Bread rises because yeast turns sugar into carbon dioxide.",
            "Oil the chain of a bicycle every 200 kilometres, and after each ride in the rain.",
            "Tomatoes need six hours of sun a day and a stake to climb.",
            "A passport has to be valid for six months after the end of the journey.",
            "The library lends books for four weeks; each may be renewed twice.",
            "Rechargeable batteries last longest between 20 and 80 percent.",
            "Descale the coffee machine with citric acid once a month.",
            "The night train to Vienna leaves at 21:40 from platform 7.",
            "Cut the hedge before March, when birds begin to nest.",
            "Wool shrinks in hot water: wash it by hand, and dry it flat.",
        ],
        start=1,
    )
}


OWN: Final[Mapping[str, Any]] = {
    "id": "5d2a5b3e-8f0c-4a58-9d5e-3a1b7c9e0f24",
    "title": "Bakery",
    "grants": ["public"],
    "chunks": [
        {"text_content": "Rye bread needs a sourdough starter that was fed on the evening before."},
        {"text_content": "The oven is cleaned on Mondays."},
    ],
}


def question(text: str) -> dict[str, Any]:
    return {
        "schema_version": "1.0.0",
        "event_id": str(uuid4()),
        "occurred_at": datetime.now(UTC).isoformat(),
        "principals": ["user:me"],
        "text": text,
    }


def test_a_question_finds_one_s_own_document_with_a_local_model(
    terminal: Terminal, model_folder: Path
) -> None:
    model = local_model(model_folder)
    terminal("topics", "--texts", "--partitions", "3")
    assert "10 new" in terminal("ingest", given=list(DOCUMENTS.values()), environment=model)
    with terminal.running("embedder", **model):
        asked = question("How often should I lubricate my bike?")
        terminal("publish", "--texts", given=[asked])
        result = terminal.answer(asked["event_id"])
    assert result["results"][0]["document_id"] == DOCUMENTS[2]["id"]
    assert result["embedding_model"] == model["ANABRANCH_EMBEDDING_MODEL"]
    assert (result["schema_version"], result["warnings"]) == ("1.1.0", [])


@pytest.mark.usefixtures("model_folder")
def test_the_demo_leads_to_an_answer_about_own_documents(demo: KeptDemo) -> None:
    """Its lines in another terminal, own documents, and a question in words."""
    assert demo.output.splitlines()[-1].endswith("against the current?'")
    (demo.folder / "own.jsonl").write_text(json.dumps(OWN))
    shown = demo.paste(
        "anabranch ingest own.jsonl",
        "anabranch ask 'What does rye bread need on the evening before?' --profile docs",
    )
    own = shown[shown.index("chunks: 2 new, 0 changed, 0 unchanged, 0 deleted") + 1 :]
    assert own[0].startswith("  public · docs · all readable documents · ")
    assert own[1].split()[:2] == ["1", "global"]
    assert "Rye bread needs a" in own[1]
    assert "Bakery" in own[1]


@pytest.mark.usefixtures("model_folder")
def test_the_tutorial_s_commands_and_programs_show_what_it_says(
    installed: Path, demo: KeptDemo, tmp_path: Path
) -> None:
    tutorial = read_tutorial()
    environment = exports_of(demo)
    model = environment["ANABRANCH_EMBEDDING_MODEL"]
    assert tutorial.set_up[-2:] == [f"export ANABRANCH_EMBEDDING_MODEL={model}", "anabranch demo --keep"]
    environment |= {
        "PATH": f"{installed.parent}:{os.environ['PATH']}",
        "COLUMNS": "110",
        "ANABRANCH_WEB_PORT": str(free_port()),
    }
    printed = run_commands(tutorial, tmp_path, environment)
    assert len(tutorial.shown) >= 9
    for place, expected in tutorial.shown.items():
        # Sorted, because standard output and standard error are one file here.
        assert sorted(map(comparable, printed[place])) == sorted(map(comparable, expected)), (
            tutorial.commands[place]
        )


async def test_a_question_finds_one_s_own_document_with_cohere_at_1024_dimensions(terminal: Terminal) -> None:
    """On the demo's servers, in a database and topics of its own. The imitation knows a text only by its words."""
    exported = terminal.environment
    connection = await asyncpg.connect(exported["DATABASE_ADMIN_CONNECTION_STRING"])
    try:
        await connection.execute("CREATE DATABASE notes")
    finally:
        await connection.close()
    own = {
        name: f"{value.rpartition('/')[0]}/notes"
        for name, value in exported.items()
        if name.startswith("DATABASE_")
    } | {
        "ANABRANCH_INPUT_TOPIC": "notes.queries",
        "ANABRANCH_OUTPUT_TOPIC": "notes.results",
        "ANABRANCH_DEAD_LETTER_TOPIC": "notes.dead-letters",
        "ANABRANCH_CONSUMER_GROUP": "notes",
        "ANABRANCH_EMBEDDING_MODEL": "embed-english-v3.0",
        "ANABRANCH_EMBEDDING_DIMENSIONS": "1024",
        "ANABRANCH_RESULT_CONTRACT": "1.1.0",
    }
    terminal = replace(terminal, environment={**exported, **own})
    key = terminal.folder / "key"
    async with imitation() as server:
        key.write_text(server.key)
        server.dimensions = 1024
        stage = {
            "ANABRANCH_TEXT_TOPIC": "notes.questions",
            "ANABRANCH_TEXT_DEAD_LETTER_TOPIC": "notes.questions.dead-letters",
            "ANABRANCH_EMBEDDER_GROUP": "notes-embedder",
            "ANABRANCH_EMBEDDING_PROVIDER": "cohere",
            "ANABRANCH_EMBEDDING_BASE_URL": f"{server.url}/cohere",
            "ANABRANCH_EMBEDDING_API_KEY_FILE": str(key),
        }

        def ask() -> dict[str, Any]:
            terminal("migrate")
            terminal("topics", "--texts", "--partitions", "3", environment=stage)
            assert "10 new" in terminal("ingest", given=list(DOCUMENTS.values()), environment=stage)
            with ExitStack() as processes:
                processes.enter_context(terminal.running("worker"))
                processes.enter_context(terminal.running("embedder", **stage))
                asked = question(DOCUMENTS[8]["chunks"][0]["text_content"])
                terminal("publish", "--texts", given=[asked], environment=stage)
                return terminal.answer(asked["event_id"])

        result = await asyncio.to_thread(ask)
    assert {request.body["input_type"] for request in server.received} == {"search_document", "search_query"}
    assert result["results"][0]["document_id"] == DOCUMENTS[8]["id"]
    assert result["results"][0]["score"] == pytest.approx(1, abs=1e-6)
    assert (result["schema_version"], result["query_embedding_dimensions"]) == ("1.1.0", 1024)
    assert result["embedding_model"] == "embed-english-v3.0"
