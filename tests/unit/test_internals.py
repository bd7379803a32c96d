"""Internal names of Faust, mode, aiohttp, aiokafka and asyncpg, and whether they are as we need them.

The tables are in `internals.md`. The first half checks each row against the installed library. The second half reads
our own source and fails where it uses a name that has no row.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import faust
import pytest
from aiokafka.consumer import fetcher
from faust.types.settings import Settings as FaustSettings

_TABLES: Final = Path(__file__).parent / "internals.md"
# Read before any test runs: a client in a test of this process replaces them.
_FETCHED: Final = {name: getattr(fetcher, name) for name in ("MemoryRecords", "PartitionRecords")}


@pytest.fixture(scope="module", autouse=True)
def _aiokafka_as_installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _FETCHED.items():
            patch.setattr(fetcher, name, value)
        yield


@dataclass(frozen=True)
class Pin:
    """A name that a library must have.

    Attributes:
        owner: a module, or ``module:Class``.
        name: an attribute of it; of a class, also one that its methods set on the instance.
        why: what it does for us, or what would go wrong.
        parameters: of a method that we call or override.
        used_by: the library's own code that has to use the name, as ``module:Class.function`` or as a file.
    """

    owner: str
    name: str
    why: str
    parameters: str | None = None
    used_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


@dataclass(frozen=True)
class Phrase:
    """A text that a library's source must have.

    Attributes:
        source: where, as in `Pin.used_by`.
        text: what is looked for.
        why: what it does for us, or what would go wrong.
    """

    source: str
    text: str
    why: str


def _rows(columns: int) -> Iterator[tuple[str, list[str]]]:
    """The rows that have so many columns, and the heading that each is below."""
    heading = ""
    for line in _TABLES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == columns and cells[0].startswith("`"):
            yield heading, cells


PINS: Final = tuple(
    Pin(
        owner,
        name.strip("`"),
        why,
        parameters.strip("`") if parameters else None,
        tuple(re.findall(r"`([^`]+)`", used_by)),
    )
    for owner, (name, parameters, used_by, why) in _rows(4)
)
PHRASES: Final = tuple(Phrase(source.strip("`"), text.strip("`"), why) for _, (source, text, why) in _rows(3))


# Checks

_LIBRARIES: Final = {"aiohttp", "aiokafka", "asyncpg", "faust", "mode", "pgvector"}


@lru_cache
def _source(place: str) -> str:
    if "/" in place:
        return (Path(faust.__file__).parents[1] / place).read_text(encoding="utf-8")
    found = pkgutil.resolve_name(place)
    if isinstance(found, property):
        found = found.fget
    elif not (inspect.ismodule(found) or inspect.isclass(found) or inspect.isroutine(found)):
        # A task or a cached property, mode's own.
        found = next(filter(inspect.isfunction, vars(found).values()))
    return textwrap.dedent(inspect.getsource(found))


def source(place: str) -> str:
    """The source of a file, or of a module, class, function or property."""
    try:
        return _source(place)
    except (AttributeError, ImportError, OSError) as error:
        raise AssertionError(f"{place} is gone") from error


def _uses(place: str, name: str) -> bool:
    text = source(place)
    if "/" in place:
        return re.search(rf"\b{name}\b", text) is not None
    return any(
        name in (getattr(node, "attr", None), getattr(node, "id", None)) for node in ast.walk(ast.parse(text))
    )


@lru_cache
def _set_in(text: str) -> frozenset[str]:
    """Attributes that a class's methods set on the instance."""
    return frozenset(
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
    )


def _own_members(cls: type) -> frozenset[str]:
    """What a class itself defines, annotates or sets, without what it inherits."""
    annotated = vars(cls).get("__annotations__", {})
    return frozenset({*vars(cls), *annotated, *_set_in(source(f"{cls.__module__}:{cls.__qualname__}"))})


def _is_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _LIBRARIES


def _members(owner: Any) -> frozenset[str]:
    if inspect.ismodule(owner):
        return frozenset(vars(owner))
    return frozenset().union(*(_own_members(cls) for cls in owner.__mro__ if _is_library(cls)))


def _owner(pin: Pin) -> Any:
    try:
        return pkgutil.resolve_name(pin.owner)
    except (AttributeError, ImportError) as error:
        raise AssertionError(f"{pin.owner} is gone; {pin.why}") from error


def verify(pin: Pin) -> None:
    """Raises AssertionError where the library does not have the name, or does not use it as we need it."""
    owner = _owner(pin)
    assert pin.name in _members(owner), f"{pin} is gone; {pin.why}"
    if pin.parameters is not None:
        found = " ".join(inspect.signature(getattr(owner, pin.name)).parameters)
        assert found == pin.parameters, f"{pin}({found}); {pin.why}"
    for place in pin.used_by:
        assert _uses(place, pin.name), f"{place} does not use {pin}; {pin.why}"


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_the_library_has_the_name(pin: Pin) -> None:
    verify(pin)


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: f"{phrase.source}-{phrase.text}")
def test_the_library_has_the_text(phrase: Phrase) -> None:
    assert phrase.text in source(phrase.source), phrase.why


def test_faust_has_every_setting_of_the_app() -> None:
    """Faust ignores a setting that it does not know."""
    tree = ast.parse((_STREAMS / "worker" / "stage_app.py").read_text(encoding="utf-8"))
    [call] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "App"
    ]
    names = {keyword.arg for keyword in call.keywords}
    assert len(names) > 20
    assert names <= set(FaustSettings.SETTINGS)


# Do the checks notice?


def _rename_in_source(patch: pytest.MonkeyPatch, name: str, *places: str) -> None:
    """Rename it where the library uses it; everywhere, or in these places alone."""
    original = source
    patch.setitem(
        globals(),
        "source",
        lambda place: (
            re.sub(rf"\b{name}\b", f"{name}_renamed", original(place))
            if not places or place in places
            else original(place)
        ),
    )


def _remove(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    for holder in [owner] if inspect.ismodule(owner) else owner.__mro__:
        if name in vars(holder):
            patch.delattr(holder, name)
        if inspect.isclass(holder) and name in vars(holder).get("__annotations__", {}):
            patch.delitem(holder.__annotations__, name)


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_a_renamed_name_is_noticed(pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _rename_in_source(patch, pin.name)
        _remove(patch, _owner(pin), pin.name)
        with pytest.raises(AssertionError, match=re.escape(f"{pin} is gone")):
            verify(pin)


@pytest.mark.parametrize(("pin", "place"), [(pin, place) for pin in PINS for place in pin.used_by], ids=str)
def test_a_name_that_is_no_longer_used_is_noticed(
    pin: Pin, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a hook stays, but another one is called."""
    _rename_in_source(monkeypatch, pin.name, place)
    with pytest.raises(AssertionError, match=re.escape(f"{place} does not use {pin}")):
        verify(pin)


@pytest.mark.parametrize("pin", [pin for pin in PINS if pin.parameters is not None], ids=str)
def test_another_parameter_is_noticed(pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*, another: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(_owner(pin), pin.name, changed)
        with pytest.raises(AssertionError, match=re.escape(f"{pin}(another)")):
            verify(pin)


# Our own source

_ROOT: Final = Path(__file__).resolve().parents[2]
_STREAMS: Final = _ROOT / "streams"

# The only modules that use private names.
_MODULES: Final = {
    "streams/broker/aiokafka_internals.py",
    "streams/worker/faust_internals.py",
    "streams/store/connect_errors.py",  # asyncpg: two names in a traceback
}
# Attributes of other libraries' objects that are documented.
_DOCUMENTED: Final = {
    "_exit",
    "check_hostname",
    "daemon",
    "no_wrap",
    "show_header",
    "verify_mode",
    "writeable",
}
# Strings of our own that look like a private name of a library.
_TEXTS: Final = {"_bundled", "_malformed", "_prune"}


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def _is_self(node: ast.expr) -> bool:
    """Whether it is an object of the class in which it is; `other` is the one that it is compared with."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in {"self", "cls", "other"}


class SourceFile:
    """A file of ours.

    Args:
        name: its path from the top of the checkout.
        text: what it contains.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.nodes = list(ast.walk(ast.parse(text)))

    @cached_property
    def defined(self) -> frozenset[str]:
        """Attributes that classes of this file define."""
        names: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                names.update(_names_in_body(node))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.add(node.attr)
        return frozenset(names)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        """Everything that is named here, strings included."""
        fields = ("id", "attr", "name", "arg", "value")
        names = {getattr(node, field, None) for node in self.nodes for field in fields}
        return frozenset(name for name in names if isinstance(name, str))

    def private_names(self) -> Iterator[tuple[int, str]]:
        """Private names of objects other than `self`, of modules, and in strings."""
        for node in self.nodes:
            names: list[str] = []
            if isinstance(node, ast.Attribute) and not _is_self(node.value):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("streams"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.islower():
                names = [] if node.value in _TEXTS else [node.value]
            for name in names:
                if _is_private(name) and name not in _DOCUMENTED:
                    yield getattr(node, "lineno", 0), name

    def set_attributes(self) -> Iterator[tuple[int, str]]:
        """Attributes that are set on objects other than `self`."""
        for node in self.nodes:
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and not _is_self(node.value)
            ):
                yield node.lineno, node.attr

    def subclasses(self) -> Iterator[tuple[ast.ClassDef, type]]:
        """Classes that extend one of the libraries'."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef) and node.bases:
                module = importlib.import_module(self.name.removesuffix(".py").replace("/", "."))
                cls = getattr(module, node.name)
                if any(map(_is_library, cls.__mro__)):
                    yield node, cls

    def unlisted(self, ours: frozenset[str]) -> Iterator[str]:
        """What the table does not have, or what does not belong into this file.

        Args:
            ours: attributes that classes of ours define.
        """
        listed = {pin.name for pin in PINS}
        for line, name in self.private_names():
            if name not in listed:
                yield f"{self.name}:{line}: {name} is not in the table"
            elif self.name not in _MODULES:
                yield f"{self.name}:{line}: {name} is used outside {', '.join(sorted(_MODULES))}"
        for line, name in self.set_attributes():
            if name not in listed | ours | _DOCUMENTED:
                yield f"{self.name}:{line}: {name} is set, and is not in the table"
        for node, cls in self.subclasses():
            owners = {f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__}
            pinned = {pin.name for pin in PINS if pin.owner in owners}
            for name in sorted(_names_of_bases(node, cls) - pinned):
                yield f"{self.name}:{node.lineno}: {cls.__name__}.{name} is not in the table"


def _names_in_body(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _names_of_bases(node: ast.ClassDef, cls: type) -> set[str]:
    """Names of the libraries' classes that a class of ours overrides or sets, and private ones that it reads.

    A private name that no class has counts as one of theirs.
    """
    names = set(_names_in_body(node)) - {"__init__"}
    for found in ast.walk(node):
        if (
            isinstance(found, ast.Attribute)
            and _is_self(found.value)
            and (isinstance(found.ctx, ast.Store) or _is_private(found.attr))
        ):
            names.add(found.attr)
    ours = frozenset().union(
        *(_own_members(base) for base in cls.__mro__ if base.__module__.startswith("streams."))
    )
    return {name for name in names if name in _members(cls) or name not in ours}


@lru_cache
def _files() -> list[SourceFile]:
    return [
        SourceFile(path.relative_to(_ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(_STREAMS.rglob("*.py"))
    ]


def _defined() -> frozenset[str]:
    return frozenset().union(*(file.defined for file in _files()))


def test_every_name_that_we_use_is_in_the_table() -> None:
    files, ours = _files(), _defined()
    assert len(files) > 100
    assert not (found := [line for file in files for line in file.unlisted(ours)]), "\n".join(found)
    assert len([cls for file in files for cls in file.subclasses()]) > 10


def test_every_name_in_the_table_is_used() -> None:
    used = frozenset().union(*(file.identifiers for file in _files()))
    assert not [str(pin) for pin in PINS if pin.name not in used]


def test_a_name_that_the_table_lacks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    private = {pin.name for pin in PINS if _is_private(pin.name)}
    monkeypatch.setitem(globals(), "PINS", ())
    ours = _defined()
    found = {word for file in _files() for line in file.unlisted(ours) for word in re.findall(r"\w+", line)}
    assert private <= found
    # A patch of a module and of an instance; an override, an attribute that is set, and a class attribute.
    assert {"MetadataRequest", "connection_made", "on_buffer_full", "spinner", "FLEXIBLE_VERSION"} <= found


@pytest.mark.parametrize(
    "text",
    [
        "consumer._client.close()",
        "from aiokafka.record.default_records import _DefaultRecordBatchPy",
        "import aiokafka.record._protocols",
        "setattr(connection, '_send_sasl_token', send)",
        "worker.blocking_timeout = 1",
    ],
)
def test_a_name_outside_these_modules_is_noticed(text: str) -> None:
    assert len(list(SourceFile("streams/another.py", text).unlisted(frozenset()))) == 1
