"""The laws of the house, read off the source tree: doors tell the truth, imports run one way, names mean one thing.

A *room* is a package under `penstock`, or a module beside them (`errors`, `splitmix`). Its *door* is its
`__init__.py`, or the module itself. An import counts wherever it stands: at the top of a module, inside a function,
or for type checkers only.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

_MUTATORS = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard", "extend"}
_HOLDERS = {"ContextVar", "Lock", "RLock", "local", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}


@cache
def paths() -> dict[str, Path]:
    """Every module's file by its dotted name; a package's is its door."""
    found = {}
    for path in sorted((SRC / "penstock").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def modules() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in paths().items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def rooms() -> list[str]:
    return sorted({room_of(module) for module in paths()} - {"", "_version", "__main__"})


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Modules of Penstock that this code imports, by statement or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in modules() else node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = [node.value for node in ast.walk(node) if isinstance(node, ast.Constant)]
            yield from (name for name in named if name in modules())


@cache
def graph() -> dict[str, set[str]]:
    """Which modules each module imports. The root is left out: it only hands on the rooms' names, when asked."""
    return {name: {*imports_of(tree)} - {name} for name, tree in modules().items() if name != "penstock"}


def rooms_imported_by(room: str) -> set[str]:
    inside = [others for module, others in graph().items() if room_of(module) == room]
    return {room_of(other) for others in inside for other in others} & set(rooms()) - {room}


def rooms_that_import(room: str) -> set[str]:
    return {other for other in rooms() if room in rooms_imported_by(other)}


def state_of(tree: ast.Module) -> set[str]:
    """What a module keeps between calls: globals it rebinds or fills, locks, and files in the user's cache.

    Memoised functions do not count, nor do tables filled while the module is imported: neither can be seen to change.
    """
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = {ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): node for node in assigned}
    makers = {name: ast.unparse(node.value.func) for name, node in targets.items() if isinstance(node.value, ast.Call)}
    kept = {name for name, maker in makers.items() if maker.split(".")[-1] in _HOLDERS}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            match node:
                case ast.Global(names=names):
                    kept.update(names)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _MUTATORS:
                    kept |= {name} & set(targets)
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    kept |= {name} & set(targets)
    text = ast.unparse(tree)
    is_cached = ("XDG_CACHE_HOME" in text or "user_cache(" in text) and "def user_cache(" not in text
    return kept | ({"the user's cache"} if is_cached else set())


def exports_of(door: ast.Module) -> list[str]:
    listed = [
        node.value for node in door.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [ast.literal_eval(name) for names in listed if isinstance(names, ast.List) for name in names.elts]


def door_of(room: str) -> str:
    """The words that the door must have, from what the code does."""

    def listed(names: set[str], none: str) -> str:
        if names == set(rooms()) - {room}:
            return "every room"
        return ", ".join(f"`{name}`" for name in sorted(names)) or none

    imports, importers = listed(rooms_imported_by(room), "nothing"), listed(rooms_that_import(room), "nobody")
    return f"May import: {imports}. Imported by: {importers}."


@pytest.mark.parametrize("room", rooms())
def test_a_door_tells_what_its_room_imports_and_who_imports_it(room: str) -> None:
    said = " ".join((ast.get_docstring(modules()[f"penstock.{room}"]) or "").split())
    assert door_of(room) in said, f"write in the door of `{room}`: {door_of(room)}"


@pytest.mark.parametrize("room", rooms())
def test_a_door_tells_whether_its_room_holds_state(room: str) -> None:
    said = " ".join((ast.get_docstring(modules()[f"penstock.{room}"]) or "").split())
    kept = sorted(
        {f"{name}: {held}" for name in modules() if room_of(name) == room for held in state_of(modules()[name])}
    )
    expected = r"Holds state: \w" if kept else r"Holds no state\."
    assert re.search(expected, said), kept


def test_rooms_import_each_other_through_their_doors() -> None:
    inside = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if room_of(module) != room_of(other) and other.count(".") > 1
    ]
    assert inside == []


def test_nobody_inside_imports_from_the_root() -> None:
    """The root takes names from every room, so importing it back would hide a cycle."""
    assert [module for module, others in graph().items() if "penstock" in others] == []


def test_no_module_imports_itself_by_a_detour() -> None:
    seen: dict[str, int] = {}
    knots: list[list[str]] = []

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            knots.append(way[way.index(module) :])
        elif module not in seen:
            for other in sorted(graph().get(module, ())):
                visit(other, [*way, module])
            seen[module] = 1

    for module in graph():
        visit(module, [])
    assert knots == []


def test_a_name_on_a_door_means_one_thing() -> None:
    """Classes inside a room may share a name with another room's: a rule against it breeds synonyms."""
    names = Counter(name for room in rooms() for name in exports_of(modules()[f"penstock.{room}"]))
    assert sorted(name for name, count in names.items() if count > 1) == []


def test_modules_named_in_strings_are_there() -> None:
    text = "\n".join(ast.unparse(tree) for tree in modules().values())
    assert set(re.findall(r"\bpenstock\.\w+\._\w+\b", text)) <= set(modules())


def test_the_code_knows_nothing_of_its_tests() -> None:
    knows = re.compile(r"\b(pytest|unittest|hypothesis|monkeypatch|conftest)\b|\btests?/", re.IGNORECASE)
    code = {path: path.read_text() for path in SRC.rglob("*.py")}
    assert [str(path.relative_to(SRC)) for path, text in code.items() if knows.search(text)] == []
