"""The public names of a module as a page shows them: signatures and docstrings, read without importing the module."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from streams.core import fields

__all__ = ["MODULES", "Entry", "documented", "entries"]

#: What the documentation describes for programs.
MODULES: Final = (
    "streams.client",
    "streams.adapters",
    "streams.adapters.langchain",
    "streams.adapters.llamaindex",
    "streams.adapters.haystack",
    "streams.ingest",
)

_ROOT: Final = Path(__file__).resolve().parents[1]
_COLUMNS: Final = 100

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Entry(NamedTuple):
    """A public name.

    Attributes:
        name: with its class.
        signature: as in the code, without a body.
        parameters: names, without self; of a class, its fields.
        text: the docstring.
    """

    name: str
    signature: str
    parameters: tuple[str, ...]
    text: str


def entries(module: str) -> Iterator[Entry]:
    """The public names of a module, and the public methods of its classes."""
    for name in _public(module):
        where, node = _found(module, name)
        if isinstance(node, ast.ClassDef):
            yield from _class(where, node, is_own=where.startswith(module))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield _function(where, node)
        else:
            yield Entry(name, ast.unparse(node), (), _text_below(where, node))


def documented(module: str) -> Iterator[str]:
    """The lines of a page that describe a module."""
    for entry in entries(module):
        yield from (f"### `{entry.name}`", "", "```python", entry.signature, "```", "")
        yield from _markdown(entry.text)


def _path(module: str) -> Path:
    base = _ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))


def _public(module: str) -> list[str]:
    [names] = [
        ast.literal_eval(node.value)
        for node in _tree(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(names)


def _found(module: str, name: str) -> tuple[str, ast.stmt]:
    """The module that defines a name, and the definition."""
    for node in _tree(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return module, node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [target.id for target in targets if isinstance(target, ast.Name)]:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and name in [each.name for each in node.names]:
            return _found(node.module, name)
    raise LookupError(f"{module} does not define {name}")


def _text_below(module: str, node: ast.stmt) -> str:
    """The string below an assignment."""
    body = _tree(module).body
    below = body[body.index(node) + 1]
    is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    return inspect.cleandoc(ast.literal_eval(below.value)) if is_text else ""  # type: ignore[attr-defined]  # an assignment or a constant


def _class(module: str, node: ast.ClassDef, *, is_own: bool) -> Iterator[Entry]:
    """A class with its public methods; of one from elsewhere only the properties that are described."""
    fields = {
        each.target.id: f"{each.target.id}: {_type(module, each.annotation)}"
        + (f" = {ast.unparse(each.value)}".replace("'", '"') if each.value is not None else "")
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_"
    }
    methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    made = [_function(module, each) for each in methods if each.name == "__init__"]
    bases = [name for name in map(ast.unparse, node.bases) if not _is_internal(name)]
    lines = [f"class {node.name}{'(' + ', '.join(bases) + ')' if bases else ''}:"]
    lines += [f"    {line}" for line in fields.values()]
    for each in made:
        lines += [f"    {line}" for line in each.signature.splitlines()]
    parameters = made[0].parameters if made else tuple(fields)
    yield Entry(node.name, "\n".join(lines) if len(lines) > 1 else lines[0] + " ...", parameters, _doc(node))
    for method in methods:
        is_property = "property" in map(ast.unparse, method.decorator_list)
        if not method.name.startswith("_") and (is_own or (is_property and _doc(method))):
            entry = _function(module, method)
            yield entry._replace(name=f"{node.name}.{method.name}")


def _function(module: str, node: _Function) -> Entry:
    """On one line, or with a line for each parameter."""
    shown = list(_parameters(module, node.args))
    names = [name for name, _ in shown if name not in {"self", "cls", "*"}]
    decorators = "".join(
        f"@{name}\n" for name in map(ast.unparse, node.decorator_list) if name in {"property", "classmethod"}
    )
    start = f"{decorators}{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}def {node.name}("
    end = f"){'' if node.returns is None else f' -> {ast.unparse(node.returns)}'}: ..."
    inside = ", ".join(text for _, text in shown)
    if len(start.splitlines()[-1] + inside + end) > _COLUMNS:
        inside = "\n" + "".join(f"    {text},\n" for _, text in shown)
    return Entry(node.name, f"{start}{inside}{end}", tuple(names), _doc(node))


def _parameters(module: str, arguments: ast.arguments) -> Iterator[tuple[str, str]]:
    """Name and text of each parameter."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    defaults = [*([None] * required), *arguments.defaults]
    for each, default in zip(positional, defaults, strict=True):
        yield each.arg, _parameter(module, each, default)
    if arguments.kwonlyargs:
        yield "*", "*"
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield each.arg, _parameter(module, each, default)
    if arguments.kwarg is not None:
        yield f"**{arguments.kwarg.arg}", f"**{_parameter(module, arguments.kwarg, None)}"


def _parameter(module: str, parameter: ast.arg, default: ast.expr | None) -> str:
    annotation = "" if parameter.annotation is None else f": {ast.unparse(parameter.annotation)}"
    if isinstance(default, ast.Name):  # a constant
        default = _found(module, default.id)[1].value  # type: ignore[attr-defined]  # an assignment or a constant
    value = "" if default is None else f" = {ast.unparse(default)}"
    return f"{parameter.arg}{annotation}{value}".replace("'", '"')


def _type(module: str, annotation: ast.expr) -> str:
    """An annotation, with the type that each internal name of the module stands for."""

    class Shown(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return self.visit(_found(module, node.id)[1].value) if _is_internal(node.id) else node  # type: ignore[attr-defined]  # an assignment or a constant

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
                return self.visit(node.slice.elts[0])  # type: ignore[no-any-return]  # as published
            return self.generic_visit(node)

    return ast.unparse(Shown().visit(ast.parse(ast.unparse(annotation), mode="eval"))).replace("'", '"')


def _is_internal(name: str) -> bool:
    """Of a module, or of what the contracts' models share."""
    return name.startswith("_") or name in fields.__all__


def _doc(node: ast.ClassDef | _Function) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def _markdown(text: str) -> Iterator[str]:
    """A docstring's paragraphs, and its sections as lists."""
    text = text.replace("``", "`")
    section = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            section = True
            yield from (f"**{line}**", "")
        elif section and (item := re.fullmatch(r"    (?! )([\w., ]+): (.*)", line)):
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            yield f"- {names}: {item[2]}"
        elif section and line.startswith("        "):
            yield f"  {line.strip()}"
        else:
            yield line.strip() if section else line
    if text:
        yield ""
