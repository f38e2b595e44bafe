"""The rules of Relay's layout, as functions from source text to a list of violations.

A module is a dotted name with its parsed source. Rules read the code and never import it, so a
planted module of two lines tests a rule as well as the package does.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = "relay_queue"

# From the bottom up. A module may import from its own layer and from those before it.
LAYERS: tuple[tuple[str, frozenset[str]], ...] = (
    ("db", frozenset({"db"})),
    (
        "pure",
        frozenset(
            {
                "states",
                "backoff",
                "ranking",
                "payload",
                "quantities",
                "conf",
                "exceptions",
                "clock",
                "signals",
                "startup",
                "verdict",
                "validation",
            }
        ),
    ),
    ("models", frozenset({"models", "migrations"})),
    ("store", frozenset({"store"})),
    # Whoever reads may name the statements and the dialects of the store, never the other way.
    ("query", frozenset({"query"})),
    # Whoever enqueues rings and the worker listens; how depends on the store's dialect.
    ("wakeup", frozenset({"wakeup"})),
    ("tasks", frozenset({"compat", "context", "task", "results", "announce", "backend"})),
    # What a program or an operator may do; a program that asks for it loads no worker.
    ("operations", frozenset({"operations", "api"})),
    ("runtime", frozenset({"worker", "checks", "apps"})),
    (
        "faces",
        frozenset(
            {
                "cli",
                "lab",
                "management",
                "admin",
                "testing",
                "metrics",
                "templatetags",
                "urls",
            }
        ),
    ),
)
LAYER_OF = {part: rank for rank, (_, parts) in enumerate(LAYERS) for part in parts}

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 50
AIM_FUNCTION_LINES = 25
FORBIDDEN_NAMES = frozenset({"utils", "helpers", "util", "helper", "misc", "common"})

TASK_FRAMEWORKS = ("django.tasks", "django_tasks")
WRITES = frozenset(
    {"save", "delete", "create", "bulk_create", "bulk_update", "get_or_create", "update_or_create"}
)
QUERYSET_METHODS = frozenset({"objects", "filter", "exclude", "all", "order_by"})
WRITING_SQL = re.compile(
    r"\b(INSERT\s+INTO|REPLACE\s+INTO|UPDATE|DELETE\s+FROM)\s+[\"'`]?relay_", re.IGNORECASE
)

# In two parts each, so that this file does not break its own rule.
MACHINE_PATHS = re.compile(r"(?<![\w.}~-])/" + r"(work|root|home)/\w")
REGISTRY_HOSTS = re.compile("|".join(["py" + "pi\\.org", "python" + "hosted", "npm" + "js\\."]))

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python module: its dotted name, its source, and whether it is a package."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.source)

    @property
    def part(self) -> str:
        """The piece of the package it belongs to: ``store`` for ``relay_queue.store.claim``."""
        return self.name.split(".")[1] if "." in self.name else ""

    @cached_property
    def docstrings(self) -> frozenset[int]:
        """Identities of the constants that are docstrings."""
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return frozenset(
            id(node.body[0].value)
            for node in ast.walk(self.tree)
            if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
        )

    def texts(self) -> Iterator[tuple[int, str]]:
        """Yield line and value of each string that is not a docstring."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Constant) or id(node) in self.docstrings:
                continue
            if isinstance(node.value, str):
                yield node.lineno, node.value

    def at(self, line: int, message: str) -> str:
        """Return one violation as text."""
        return f"{self.name}:{line}: {message}"


@cache
def load(root: Path) -> list[Module]:
    """Return every module of the package under ``root``."""
    modules = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return modules


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything imported, wherever the import stands."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def upward_imports(module: Module) -> list[str]:
    """A module imports only from its own layer and the layers below."""
    if not module.part:
        return []
    if module.part not in LAYER_OF:
        return [module.at(1, f"{module.part!r} has no layer: add it to LAYERS")]
    found = []
    for line, name in imports(module):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if package != PACKAGE or target not in LAYER_OF:
            continue
        if LAYER_OF[target] > LAYER_OF[module.part]:
            own, other = LAYERS[LAYER_OF[module.part]][0], LAYERS[LAYER_OF[target]][0]
            found.append(module.at(line, f"imports {name}: {own} may not look up to {other}"))
    return found


def task_framework_outside_compat(module: Module) -> list[str]:
    """Only ``compat`` knows which of the two task frameworks is there."""
    if module.name == f"{PACKAGE}.compat":
        return []
    mentions = [*imports(module), *module.texts()]
    return [
        module.at(line, f"names {text!r}: go through {PACKAGE}.compat")
        for line, text in mentions
        if any(text == name or text.startswith(f"{name}.") for name in TASK_FRAMEWORKS)
    ]


def functions(module: Module) -> Iterator[tuple[FunctionNode, int]]:
    """Yield every function with its length in lines, without decorators and docstring."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node, lines


def too_long(module: Module) -> list[str]:
    """Modules stay within 500 lines and functions within 50; migrations are written by Django."""
    if module.part == "migrations":
        return []
    found = []
    length = len(module.source.splitlines())
    if length > MAX_MODULE_LINES:
        found.append(module.at(1, f"{length} lines; the limit is {MAX_MODULE_LINES}: split it"))
    for node, lines in functions(module):
        if lines > MAX_FUNCTION_LINES:
            message = f"{node.name} has {lines} lines; the limit is {MAX_FUNCTION_LINES}"
            found.append(module.at(node.lineno, message))
    return found


def nameless_module(module: Module) -> list[str]:
    """No module is named after having no subject."""
    last = module.name.rpartition(".")[2]
    return [module.at(1, "name it after its subject")] if last in FORBIDDEN_NAMES else []


def vendor_comparison(module: Module) -> list[str]:
    """Differences of vendors are capabilities of a dialect, not branches elsewhere."""
    if module.part == "db" or module.name.startswith(f"{PACKAGE}.store.dialects"):
        return []
    found = []
    for node in ast.walk(module.tree):
        subjects: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            subjects = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            subjects = [node.subject]
        found += [
            module.at(item.lineno, "asks for the vendor: use a dialect's capability")
            for item in subjects
            if isinstance(item, ast.Attribute) and item.attr == "vendor"
        ]
    return found


def missing_docstrings(module: Module) -> list[str]:
    """Modules, and the public classes, functions and methods in them, say what they are for."""
    if module.part == "migrations":
        return []
    found = []
    if module.source.strip() and ast.get_docstring(module.tree) is None:
        found.append(module.at(1, "the module has no docstring"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    waiting: list[ast.Module | ast.ClassDef] = [module.tree]
    while waiting:
        for node in waiting.pop().body:
            if not isinstance(node, kinds) or node.name.startswith("_") or node.name == "Meta":
                continue
            if ast.get_docstring(node) is None and not _is_overload(node):
                found.append(module.at(node.lineno, f"{node.name} has no docstring"))
            if isinstance(node, ast.ClassDef):
                waiting.append(node)
    return found


def _is_overload(node: FunctionNode | ast.ClassDef) -> bool:
    """Overloads and property setters are described where the first of them stands."""
    names = {ast.unparse(item).rpartition(".")[2] for item in node.decorator_list}
    return bool(names & {"overload", "setter", "deleter"})


def _chain(node: ast.expr) -> list[str]:
    """Return the names along ``Job.objects.filter(...).update``, the root first."""
    names: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Name):
            return [node.id, *reversed(names)]
        else:
            return ["", *reversed(names)]


def writes_outside_store(module: Module) -> list[str]:
    """Only the store writes the tables. Told by the shape of a call, as far as that goes."""
    if module.part in {"store", "migrations", "db"}:
        return []
    found = [
        module.at(line, "writes a table of Relay in SQL: that is the store's")
        for line, text in module.texts()
        if WRITING_SQL.search(text)
    ]
    if not any(name.startswith(f"{PACKAGE}.models.") for _, name in imports(module)):
        return found
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            *path, method = _chain(node.func)
            method = method.removeprefix("a") if method.startswith("a") else method
            on_rows = bool(QUERYSET_METHODS & set(path)) and method == "update"
            if (method in WRITES or on_rows) and path[0] != "super":
                found.append(module.at(node.lineno, f"calls {method}: writing is the store's"))
    return found


def prints_outside_cli(module: Module) -> list[str]:
    """Only the command line prints; everything else logs."""
    if module.part == "cli":
        return []
    return [
        module.at(node.lineno, "prints: log it, or leave it to the cli")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


RULES = (
    upward_imports,
    task_framework_outside_compat,
    too_long,
    nameless_module,
    vendor_comparison,
    missing_docstrings,
    writes_outside_store,
    prints_outside_cli,
)


def private_places(name: str, text: str) -> list[str]:
    """No file names a path of somebody's machine or the host of a package registry."""
    return [
        f"{name}:{number}: {found.group()!r} holds on one machine only"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE_PATHS, REGISTRY_HOSTS)
        if (found := pattern.search(line))
    ]
