"""Which commands read which setting: what the function of each command refers to, directly or through others.

The names of settings are unique, so an attribute with such a name is a setting. All branches count.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from streams.settings import EmbedderSettings, EmbeddingSettings, IngestionSettings, Settings

__all__ = ["CLIENT", "readers"]

#: What a program reads that calls `Client.from_environment`.
CLIENT: Final = "client"

_ROOT: Final = Path(__file__).resolve().parents[1]
_KINDS: Final = (Settings, EmbeddingSettings, EmbedderSettings, IngestionSettings)
_FIELDS: Final = frozenset(field for kind in _KINDS for field in kind.model_fields)
_PROPERTIES: Final[Mapping[str, frozenset[str]]] = {
    "store_dsn": frozenset({"database_connection_string"}),
    "admin_dsn": frozenset({"database_admin_connection_string"}),
    "dsn": frozenset({"database_ingestion_connection_string"}),
    "pool_size": frozenset({"anabranch_pool_size"}),
}
# In the settings of an embedding stage, these replace the worker's: see `load_embedder`.
_OF_STAGE: Final = {
    "anabranch_input_topic": "anabranch_text_topic",
    "anabranch_output_topic": "anabranch_input_topic",
    "anabranch_dead_letter_topic": "anabranch_text_dead_letter_topic",
    "anabranch_consumer_group": "anabranch_embedder_group",
}
_INPUTS: Final = {"anabranch_input_topic", "anabranch_dead_letter_topic"}

_Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class _Name(NamedTuple):
    """A definition in a module, or a module: then `name` is None."""

    module: str
    name: str | None


@cache
def readers() -> dict[str, list[str]]:
    """The names of settings (as environment variables) to the commands that read them, in order."""
    read = {
        path.stem: _read_from(_Name(f"streams.cli.commands.{path.stem}", path.stem))
        for path in sorted((_ROOT / "streams/cli/commands").glob("[a-z]*.py"))
        # Shows all of them.
        if path.stem not in {"settings", "contract"}
    }
    # With --texts, a command also uses the topics that the embedding stage reads and dead-letters to.
    for command in ("check", "publish", "replay", "tail", "topics"):
        read[command] |= {_OF_STAGE[topic] for topic in _INPUTS & read[command]}
    read["embedder"] = {_OF_STAGE.get(field, field) for field in read["embedder"]}
    # It starts servers of its own, and passes these on; with --keep also those of the provider.
    read["demo"] = {"anabranch_profiles_file", *EmbeddingSettings.model_fields}
    read[CLIENT] = _read_from(_Name("streams.client.client", "Client"))
    return {
        field.upper(): [command for command, fields in read.items() if field in fields] for field in _FIELDS
    }


def _read_from(start: _Name) -> set[str]:
    """The settings that a definition reads, and what it refers to."""
    found: set[str] = set()
    seen: set[_Name] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in seen or name.module == "streams.settings":
            continue
        seen.add(name)
        for node in _expressions(_definitions()[name]):
            if isinstance(node, ast.Name):
                waiting += _resolved(_Name(name.module, node.id))
            elif isinstance(node, ast.Attribute):
                base = node.value.attr if isinstance(node.value, ast.Attribute) else None
                if isinstance(node.value, ast.Name):
                    base = node.value.id
                    for module in _resolved(_Name(name.module, base), modules=True):
                        waiting += _resolved(_Name(module.module, node.attr))
                if node.attr in _FIELDS:
                    found.add(node.attr)
                elif base == "settings":
                    found |= _PROPERTIES.get(node.attr, frozenset())
    return found


def _expressions(definition: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations and the types of caught exceptions, which do not run."""
    yield definition
    for field, value in ast.iter_fields(definition):
        if field not in {"annotation", "returns"} and not (
            isinstance(definition, ast.ExceptHandler) and field == "type"
        ):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _expressions(child)


@cache
def _modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in (_ROOT / "streams").rglob("*.py")
    }


@cache
def _definitions() -> dict[_Name, _Definition]:
    """Everything that is defined at the top of a module."""
    found: dict[_Name, _Definition] = {}
    for module, tree in _modules().items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[_Name(module, node.name)] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found[_Name(module, target.id)] = node
    return found


@cache
def _imports(module: str) -> dict[str, _Name]:
    """What the names mean that a module imports, anywhere in it."""
    found = {}
    for node in ast.walk(_modules()[module]):
        if isinstance(node, ast.ImportFrom) and node.module in _modules():
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = (
                    _Name(inner, None) if inner in _modules() else _Name(node.module, alias.name)
                )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in _modules() and alias.asname:
                    found[alias.asname] = _Name(alias.name, None)
    return found


def _resolved(name: _Name, *, modules: bool = False) -> list[_Name]:
    """The definition that a name stands for in its module, or the module; none if it is not of this project."""
    if name in _definitions():
        return [] if modules else [name]
    if name.name is None:
        return [name] if modules else []
    target = _imports(name.module).get(name.name)
    return [] if target is None else _resolved(target, modules=modules)
