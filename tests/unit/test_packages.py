"""Tests are one package: each module has one name, which everything imports it by."""

import ast
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = sorted((ROOT / "tests").rglob("*.py"))


def test_every_folder_is_a_package() -> None:
    assert len(FILES) > 150
    assert [path for path in {file.parent for file in FILES} if not (path / "__init__.py").is_file()] == []


def test_no_loaded_module_has_two_names() -> None:
    names: dict[Path, set[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and (path := Path(file).resolve()).is_relative_to(ROOT / "tests"):
            names.setdefault(path, set()).add(name)
    assert len(names) > 1
    for path, found in names.items():
        parts = path.relative_to(ROOT).with_suffix("").parts
        assert found == {".".join(parts).removesuffix(".__init__")}, path


def test_imports_name_the_package() -> None:
    """Not a path: whoever changes ``sys.path`` gives modules a second name."""
    own = {file.stem for file in FILES} | {file.parent.name for file in FILES}
    own -= {"tests", *sys.stdlib_module_names}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{where}: relative"
                assert node.module is not None
                assert node.module.partition(".")[0] not in own, f"{where}: imports {node.module}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    assert alias.name.partition(".")[0] not in own, f"{where}: imports {alias.name}"
            elif isinstance(node, ast.Call | ast.Assign | ast.AugAssign | ast.Delete):
                changed = node.func if isinstance(node, ast.Call) else node
                targets = getattr(changed, "targets", [getattr(changed, "target", changed)])
                assert not any("sys.path" in ast.unparse(target) for target in targets), f"{where}: sys.path"
