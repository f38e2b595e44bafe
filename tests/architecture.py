"""The rules of Relay's layout, as functions from source text to a list of violations.

A module is a dotted name with its parsed source. Rules read the code and never import it, so a
planted module of two lines tests a rule as well as the package does. `RULES` look at one module,
`RULES_OF_ALL` at all of them together.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
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
                "logs",
                "clock",
                "signals",
                "startup",
                "verdict",
                "validation",
                "timing",
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
    ("operations", frozenset({"operations", "api", "schedules"})),
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
MIN_MODULE_LINES = 80
"""A shorter module that only one other imports is a part of that other one."""

SHORT_BY_NATURE: Mapping[str, str] = {
    "relay_queue.db.sqlite3.creation": "every engine of Django has a module of this name",
    "relay_queue.query.prunable": "it alone counts whole tables, and commands hold no SQL",
    "relay_queue.signals": "projects import it, to connect their receivers",
    "relay_queue.worker.services.*": "a service is one file and one line of the list of services",
    "relay_queue.management.commands.*": "Django finds commands by the names of their modules",
    "relay_queue.*apps": "Django finds it by its name",
    "relay_queue.*__main__": "Python runs it by its name",
}
"""Modules that may be short although only one other imports them, each with the reason."""

MAX_FUNCTION_LINES = 50
AIM_FUNCTION_LINES = 25
FORBIDDEN_NAMES = frozenset({"utils", "helpers", "util", "helper", "misc", "common"})

TASK_FRAMEWORKS = ("django.tasks", "django_tasks")
WRITES = frozenset(
    {"save", "delete", "create", "bulk_create", "bulk_update", "get_or_create", "update_or_create"}
)
QUERYSET_METHODS = frozenset({"objects", "filter", "exclude", "all", "order_by"})
GAP = "{}"
"""What stands in a text for a part that is filled in when the code runs."""

WRITTEN_TABLE = re.compile(
    r"""
    \b(?: (?:INSERT|REPLACE|MERGE)\s+INTO | DELETE\s+FROM | TRUNCATE(?:\s+TABLE)? | INTO
        | UPDATE(?=\s+\S+(?:\s+(?:AS\s+)?\w+)?\s+SET\s+(?:\{|\S+\s*=)) | UPDATE(?=\s+["'`]?relay_) )
    \s+ (?:ONLY\s+)? ["'`]? (?P<table>%\(\w+\)s|[^\s"'`(,;]+)
    """,
    re.IGNORECASE | re.VERBOSE,
)
PLACEHOLDER = re.compile(r"\{[^{}]*\}|%s|%\(\w+\)s|\$\w+|\$\{\w+\}")

WRITERS_OF_SCRATCH: Mapping[str, str] = {
    "relay_queue.lab.data": "fills scratch databases that nobody has open: enqueues take hours",
    "relay_queue.lab.drill.injector": "alters a row as a faulty disk does, which no verb may",
}
"""Modules outside of the store that write its tables in SQL, each with the reason."""

COUNTER_TABLE = "relay_queue_queuecount"

HARD_WORDS = re.compile(r"\b(anew|lest|befell|whence|thereof|in vain|takes? (?:its|their) leave)\b")
"""Words that many readers of English as a second language do not know, or must read twice."""

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


def _flat(node: ast.AST) -> str | None:
    """Return the text that an expression puts together, with gaps for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_flat(part) or GAP for part in parts)
        case ast.BinOp(op=ast.Add()):
            left, right = _flat(node.left), _flat(node.right)
            return None if left is None and right is None else f"{left or GAP}{right or GAP}"
        case ast.Call(
            func=ast.Attribute(attr="join", value=ast.Constant(value=str(between))),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
        ):
            return between.join(_flat(part) or GAP for part in parts)
    return None


def _replaced(module: Module) -> list[str]:
    """Return what the module replaces in texts: a statement may name a table by that."""
    return [
        node.args[0].value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "replace"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and len(node.args[0].value) > 1
    ]


def written_tables(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and table of every statement that writes one of Relay's, or one filled in."""
    replaced = _replaced(module)
    seen: set[tuple[int, str]] = set()
    for node in ast.walk(module.tree):
        text = None if id(node) in module.docstrings else _flat(node)
        for found in WRITTEN_TABLE.finditer(text or ""):
            table = found["table"]
            named = table.lower().startswith("relay_")
            # Prose may go into anything; only a statement goes into a table of Relay.
            bare = found[0].lower().startswith(("into", "truncate"))
            filled = PLACEHOLDER.search(table) or any(word in table for word in replaced)
            place = (getattr(node, "lineno", 1), table)
            if (named or (filled and not bare)) and place not in seen:
                seen.add(place)
                yield place


def writes_outside_store(module: Module) -> list[str]:
    """Only the store writes the tables: in SQL, also where a table's name is filled in, or by models."""
    if module.part in {"store", "migrations", "db"} or module.name in WRITERS_OF_SCRATCH:
        return []
    found = [
        module.at(line, f"writes the table {table} in SQL: that is the store's")
        for line, table in written_tables(module)
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


def counts_by_hand(module: Module) -> list[str]:
    """Only `transitions` tells the counters of a move, and `queues.recount` what the rows say."""
    if module.name == f"{PACKAGE}.store.transitions":
        return []
    allowed: set[int] = set()
    if module.name == f"{PACKAGE}.store.queues":
        recount = (node for node, _ in functions(module) if node.name == "recount")
        allowed = {id(inner) for node in recount for inner in ast.walk(node)}
    found = [
        module.at(node.lineno, "counts jobs: note the step with store.transitions.moved")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "count"
        and len(node.args) + len(node.keywords) == 3
        and id(node) not in allowed
    ]
    if module.part == "store" and module.name.rpartition(".")[2] not in {"transaction", "queues"}:
        found += [
            module.at(line, "writes the counters: the transaction does that")
            for line, table in written_tables(module)
            if table == COUNTER_TABLE
        ]
    return found


def _prose(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment and docstring, those of constants and fields included."""
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and (text := _flat(node.value)) is not None:
            yield node.lineno, text


def hard_words(module: Module) -> list[str]:
    """Comments and docstrings are plain English: no archaic words."""
    return [
        module.at(line, f"says {found.group()!r}: use a plainer word")
        for line, text in _prose(module)
        for found in HARD_WORDS.finditer(text.lower())
    ]


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


def loggers_by_hand(module: Module) -> list[str]:
    """Lines of the log spell out control characters; `db` logs no text of a job."""
    if module.part in ("db", "logs"):
        return []
    return [
        module.at(node.lineno, "makes a logger by itself: take logs.get_logger")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and _chain(node) == ["logging", "getLogger"]
        and (not node.args or ast.unparse(node.args[0]) != "record.name")
    ]


RULES = (
    upward_imports,
    task_framework_outside_compat,
    too_long,
    nameless_module,
    vendor_comparison,
    missing_docstrings,
    writes_outside_store,
    counts_by_hand,
    hard_words,
    prints_outside_cli,
    loggers_by_hand,
)


def imported_modules(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Return for each module the others of the package that it imports, wherever that stands.

    Imports for the type checker count, too: whoever reads the one file must open the other. A name
    that a package hands out leads to the package, even if a module of it has the same name.
    """
    by_name = {module.name: module for module in modules}
    handed_out = {
        module.name: {name.rpartition(".")[2] for _, name in imports(module)}
        for module in modules
        if module.is_package
    }
    found: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for _, name in imports(module):
            base, _, last = name.rpartition(".")
            if name in by_name:
                found[module.name].add(name)
            if base in by_name and (name not in by_name or last in handed_out.get(base, ())):
                found[module.name].add(base)
        found[module.name].discard(module.name)
    return found


def circles(modules: Sequence[Module]) -> list[str]:
    """No file imports another that imports it again, be it in a function or for types alone."""
    graph = imported_modules(modules)
    found = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = error.args[1]
            found.append(f"{' -> '.join(reversed(circle))}: give one what it needs, or merge them")
            # Without this arrow, so that the next circle is seen, too.
            graph[circle[1]].discard(circle[0])
        else:
            return found


def too_short(modules: Sequence[Module]) -> list[str]:
    """No module under 80 lines that only one other imports, but for those that are so by nature."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for importer, imported in imported_modules(modules).items():
        for name in imported:
            importers[name].add(importer)
    found = []
    for module in modules:
        length = len(module.source.splitlines())
        alone = len(importers[module.name]) == 1 and not module.is_package
        if not alone or length >= MIN_MODULE_LINES:
            continue
        if not any(fnmatch(module.name, pattern) for pattern in SHORT_BY_NATURE):
            (importer,) = importers[module.name]
            found.append(
                module.at(1, f"{length} lines, and only {importer} imports it: merge them")
            )
    return found


RULES_OF_ALL = (circles, too_short)


def private_places(name: str, text: str) -> list[str]:
    """No file names a path of somebody's machine or the host of a package registry."""
    return [
        f"{name}:{number}: {found.group()!r} holds on one machine only"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE_PATHS, REGISTRY_HOSTS)
        if (found := pattern.search(line))
    ]
