"""Where the code of dhp_ray calls functions of other packages, and uses their private names, found in its source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("dhp_ray", "benchmarks")
PACKAGES = {"torch", "transformers"}
DEVICE = "torch.get_device_module()"


@dataclass(frozen=True)
class Call:
    """A call in the source. `name` is the function's full name; of a method of an object, a dot and its name."""

    name: str
    positional: int
    keywords: tuple[str, ...]
    partial: bool
    """Whether it has arguments, by `*` or `**`, that its place does not show."""
    place: str

    def misfit(self, signature: inspect.Signature) -> str:
        """Why a function of this signature cannot be called so; empty where it can."""
        bind = signature.bind_partial if self.partial else signature.bind
        try:
            bind(*range(self.positional), **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.place}: {self.name}{signature}: {error}"
        return ""


def signature_of(text: str) -> inspect.Signature:
    """The signature that reads `text`, such as "(timeout, group=None)"; a default `...` stands for any."""
    found: dict[str, object] = {}
    exec(f"def function{text}: pass", found)
    return inspect.signature(found["function"])  # type: ignore[arg-type]


@dataclass
class Source:
    """What our modules that import torch or transformers do."""

    folders: tuple[str, ...] = FOLDERS
    calls: list[Call] = field(default_factory=list)
    used: dict[str, set[str]] = field(default_factory=dict)
    """Names, each with the files that use it: whole where the source shows the name's origin; `.name` where it stands
    behind a dot, or in a call of getattr, hasattr or setattr, on an object that may be of any kind."""
    defined: set[str] = field(default_factory=set)
    """Names of functions, classes and attributes of our own."""

    def __post_init__(self) -> None:
        for file in (file for folder in self.folders for file in sorted((ROOT / folder).rglob("*.py"))):
            self.read(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))

    def read(self, text: str, file: str) -> None:
        """Add a module to the source, if it imports one of PACKAGES."""
        module = ast.parse(text)
        if any(_root(name) in PACKAGES for node in ast.walk(module) for name in _imported(node)):
            _Module(self, file).visit(module)

    def calls_of(self, name: str) -> list[Call]:
        """The calls of a function by its full name, or of a method (`.name`) on whatever object."""
        return [call for call in self.calls if call.name == name]

    def internals(self) -> dict[str, set[str]]:
        """The names of `used` that torch and transformers do not document: with a part that begins with an underscore,
        or below a module of transformers. Of an object that may be of any kind, names that are not our own.
        """
        return {name: files for name, files in self.used.items() if self._is_internal(name)}

    def _is_internal(self, name: str) -> bool:
        root, *parts = name.split(".")
        is_private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        if root == "":
            return is_private and parts[0] not in self.defined
        return (is_private and root in PACKAGES) or (root == "transformers" and len(parts) > 1 and parts[0].islower())


def _root(name: str) -> str:
    return name.partition(".")[0]


def _imported(node: ast.AST) -> list[str]:
    """The full names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


class _Module(ast.NodeVisitor):
    def __init__(self, source: Source, file: str) -> None:
        self.source, self.file = source, file
        self.origins: dict[str, str] = {}  # what names of the module, and of the function looked at, stand for

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.origins[alias.asname or _root(alias.name)] = alias.name if alias.asname else _root(alias.name)
            self._use(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias, name in zip(node.names, _imported(node)):
            self.origins[alias.asname or alias.name] = name
            self._use(name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.source.defined.add(node.name)
        outside, self.origins = self.origins, dict(self.origins)
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                self.origins.pop(argument.arg, None)
        self.generic_visit(node)
        self.origins = outside

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.source.defined.add(node.name)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assign([node.target], node.value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and isinstance(node.ctx, ast.Store):
            self.source.defined.add(node.attr)
        self._use(self._origin(node) or f".{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._origin(node.func) or (f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else "")
        if name:
            starred = [argument for argument in node.args if isinstance(argument, ast.Starred)]
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            self.source.calls.append(Call(name, len(node.args) - len(starred), keywords,
                                          bool(starred) or len(keywords) < len(node.keywords), self._place(node)))
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                          args=[_, ast.Constant(value=str(attribute)), *_]):
                self._use(f".{attribute}")
        self.generic_visit(node)

    def _use(self, name: str) -> None:
        self.source.used.setdefault(name, set()).add(self.file)

    def _assign(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    self.origins.pop(name.id, None)
                    self.source.defined.add(name.id)
            if isinstance(target, ast.Name) and value is not None and (origin := self._origin(value)):
                self.origins[target.id] = origin

    def _origin(self, node: ast.expr) -> str:
        """The full name of what an expression stands for, where imports and plain assignments say it."""
        match node:
            case ast.Name(id=name):
                return self.origins.get(name, "")
            case ast.Attribute(value=value, attr=attribute):
                origin = self._origin(value)
                return f"{origin}.{attribute}" if origin else ""
            case ast.Call(func=function) if self._origin(function) == "torch.get_device_module":
                return DEVICE
        return ""

    def _place(self, node: ast.expr) -> str:
        return f"{self.file}:{node.lineno}"


def calls_that_do_not_fit(source: Source, name: str, signature: inspect.Signature) -> Iterator[str]:
    calls = source.calls_of(name)
    if not calls:
        yield f"{name}: nothing calls it; it need not stand here"
    yield from filter(None, (call.misfit(signature) for call in calls))
