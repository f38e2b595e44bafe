"""The package keeps its layers, sizes and habits; and each rule catches what it is meant to."""

import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests import architecture
from tests.architecture import Module

ROOT = Path(__file__).resolve().parent.parent

TOP_LEVEL = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "docs",
    "manage.py",
    "pyproject.toml",
    "relay_project",
    "relay_queue",
    "requirements.txt",
    "templates",
    "tests",
}


def tracked_files() -> list[Path]:
    """Return the files under version control, as paths below the root."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout: the files of the project cannot be listed")
    # A file that is deleted but not yet committed is still listed.
    return [Path(name) for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("rule", architecture.RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Callable[[Module], list[str]]) -> None:
    modules = architecture.load(ROOT)
    assert len(modules) > 10
    violations = [line for module in modules for line in rule(module)]
    assert not violations, f"{rule.__doc__}\n" + "\n".join(violations)


@pytest.mark.parametrize("rule", architecture.RULES_OF_ALL, ids=lambda rule: rule.__name__)
def test_all_modules_together_keep_the_rule(rule: Callable[[Sequence[Module]], list[str]]) -> None:
    violations = rule(architecture.load(ROOT))
    assert not violations, f"{rule.__doc__}\n" + "\n".join(violations)


def test_exceptions_from_rules_are_of_modules_that_need_them() -> None:
    modules = {module.name: module for module in architecture.load(ROOT)}
    for name in architecture.WRITERS_OF_SCRATCH:
        assert list(architecture.written_tables(modules[name])), f"{name} writes nothing any more"
    for pattern in architecture.SHORT_BY_NATURE:
        if "*" not in pattern:
            lines = len(modules[pattern].source.splitlines())
            assert lines < architecture.MIN_MODULE_LINES, f"{pattern} is not short any more"


def test_most_functions_are_short() -> None:
    lengths = sorted(
        lines for module in architecture.load(ROOT) for _, lines in architecture.functions(module)
    )
    median, ninth = statistics.median(lengths), lengths[int(len(lengths) * 0.9)]
    assert ninth <= architecture.AIM_FUNCTION_LINES, (
        f"of {len(lengths)} functions half have up to {median:g} lines and nine of ten up to "
        f"{ninth}; the aim is {architecture.AIM_FUNCTION_LINES}"
    )


def test_every_layer_is_listed_once() -> None:
    listed = [part for _, parts in architecture.LAYERS for part in parts]
    assert len(listed) == len(set(listed))


def test_top_level_is_the_agreed_one() -> None:
    names = {path.parts[0] for path in tracked_files()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_no_file_names_a_private_place() -> None:
    violations = []
    for path in tracked_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            # Compiled translations and images.
            continue
        violations += architecture.private_places(str(path), text)
    assert not violations, "\n".join(violations)


BROKEN = [
    (architecture.upward_imports, "relay_queue.store.claim", "from relay_queue.worker import loop"),
    (architecture.upward_imports, "relay_queue.store.claim", "from relay_queue import worker"),
    (architecture.upward_imports, "relay_queue.store.claim", "from ..worker import loop"),
    (architecture.upward_imports, "relay_queue.store.claim", "import relay_queue.lab.demo"),
    (
        architecture.upward_imports,
        "relay_queue.clock",
        "def now():\n    from relay_queue.models import Job",
    ),
    (architecture.upward_imports, "relay_queue.db.gate", "from relay_queue.conf import settings"),
    (architecture.upward_imports, "relay_queue.novelty", ""),
    (architecture.task_framework_outside_compat, "relay_queue.task", "import django.tasks"),
    (
        architecture.task_framework_outside_compat,
        "relay_queue.task",
        "from django_tasks.base import Task",
    ),
    (architecture.task_framework_outside_compat, "relay_queue.task", "from django import tasks"),
    (architecture.task_framework_outside_compat, "relay_queue.apps", "NAME = 'django_tasks'"),
    (architecture.too_long, "relay_queue.clock", "x = 1\n" * 501),
    (architecture.too_long, "relay_queue.clock", "def f():\n" + "    x = 1\n" * 50),
    (architecture.nameless_module, "relay_queue.store.utils", ""),
    (
        architecture.vendor_comparison,
        "relay_queue.worker.loop",
        "if connection.vendor == 'sqlite':\n    pass",
    ),
    (
        architecture.vendor_comparison,
        "relay_queue.worker.loop",
        "ok = connection.vendor in ('sqlite', 'postgresql')",
    ),
    (
        architecture.vendor_comparison,
        "relay_queue.worker.loop",
        "match connection.vendor:\n    case 'sqlite':\n        pass",
    ),
    (architecture.missing_docstrings, "relay_queue.clock", "x = 1"),
    (architecture.missing_docstrings, "relay_queue.clock", "'''Doc.'''\ndef now(): ..."),
    (architecture.missing_docstrings, "relay_queue.clock", "'''Doc.'''\nclass Clock: ..."),
    (
        architecture.missing_docstrings,
        "relay_queue.clock",
        "'''Doc.'''\nclass Clock:\n    '''Doc.'''\n    def now(self): ...",
    ),
    (
        architecture.writes_outside_store,
        "relay_queue.admin.jobs",
        "from relay_queue.models import Job\nJob.objects.filter(pk=1).update(state='dead')",
    ),
    (
        architecture.writes_outside_store,
        "relay_queue.admin.jobs",
        "from relay_queue.models import Job\ndef f(job):\n    job.save()",
    ),
    (
        architecture.writes_outside_store,
        "relay_queue.worker.loop",
        "from relay_queue.models import Job\nasync def f():\n    await Job.objects.acreate(pk=1)",
    ),
    (
        architecture.writes_outside_store,
        "relay_queue.cli.upkeep",
        "SQL = 'UPDATE relay_job SET state = 1'",
    ),
    *[
        (architecture.writes_outside_store, "relay_queue.lab.bench.filling", source)
        for source in (
            "COPY = 'INSERT INTO {job} (id) SELECT 1'.format(job=table)",
            "COPY = 'INSERT INTO %s (id) SELECT 1' % table",
            "COPY = 'INSERT INTO %(job)s (id) SELECT 1' % names",
            "COPY = f'INSERT INTO {table} (id) SELECT 1'",
            "COPY = f'INSERT INTO {Job._meta.db_table} (id) SELECT 1'",
            "COPY = f'INSERT INTO {{job}} (id) SELECT {column}'",
            "COPY = 'INSERT INTO JOB_TABLE (id) SELECT 1'.replace('JOB_TABLE', table)",
            "COPY = 'INSERT INTO JOB_TABLE (id) SELECT 1'\nrun(COPY.replace('JOB_TABLE', table))",
            "COPY = 'insert into ' + table + ' (id) SELECT 1'",
            "COPY = ' '.join(['DELETE FROM', table])",
            "COPY = 'UPDATE {job} SET state = 1'",
            "COPY = 'UPDATE {job} AS j SET state = 1'",
            "COPY = 'UPDATE ' + table + ' SET state = 1'",
            "COPY = f'UPDATE relay_queue_{name} SET state = 1'",
            "COPY = f'UPDATE {prefix}_job SET state = 1'",
            "COPY = f'{verb} INTO relay_queue_job VALUES (1)'",
            "COPY = 'DELETE FROM \"relay_queue_job\"'",
            "COPY = 'TRUNCATE relay_queue_lease'",
            "COPY = 'update only relay_queue_job set state = 1'",
        )
    ],
    (
        architecture.counts_by_hand,
        "relay_queue.store.claim",
        "def f(tx):\n    tx.count('default', 'ready', -1)",
    ),
    (
        architecture.counts_by_hand,
        "relay_queue.store.queues",
        "def pause(tx):\n    tx.count('default', 'ready', n=-1)",
    ),
    (
        architecture.counts_by_hand,
        "relay_queue.worker.tick",
        "with transaction() as savepoint:\n    savepoint.count('default', 'ready', 1)",
    ),
    (
        architecture.counts_by_hand,
        "relay_queue.store.prune",
        "SQL = 'UPDATE relay_queue_queuecount SET n = 0'",
    ),
    (architecture.hard_words, "relay_queue.clock", "# Begin anew."),
    (architecture.hard_words, "relay_queue.clock", "'Wait, lest it fails.'"),
    (architecture.hard_words, "relay_queue.clock", "X = 1\n'Tried in vain.'"),
    (architecture.prints_outside_cli, "relay_queue.worker.loop", "print('hello')"),
]


@pytest.mark.parametrize(
    ("rule", "name", "source"), BROKEN, ids=[f"{rule.__name__}-{name}" for rule, name, _ in BROKEN]
)
def test_rule_catches_a_planted_violation(
    rule: Callable[[Module], list[str]], name: str, source: str
) -> None:
    assert rule(Module(name, source))


KEPT = [
    (architecture.upward_imports, "relay_queue.worker.loop", "from relay_queue.store import claim"),
    (architecture.upward_imports, "relay_queue.store.claim", "from relay_queue import clock"),
    (architecture.upward_imports, "relay_queue.clock", "from relay_queue import __version__"),
    (architecture.task_framework_outside_compat, "relay_queue.compat", "import django_tasks"),
    (
        architecture.task_framework_outside_compat,
        "relay_queue.task",
        "'''Goes with ``from django.tasks import task``.'''",
    ),
    (architecture.too_long, "relay_queue.clock", "def f():\n" + "    x = 1\n" * 49),
    (
        architecture.vendor_comparison,
        "relay_queue.store.dialects",
        "ok = connection.vendor == 'sqlite'",
    ),
    (
        architecture.writes_outside_store,
        "relay_queue.admin.jobs",
        "from relay_queue.models import Job\nseen = {}\nseen.update(a=1)\nJob.objects.count()",
    ),
    (
        architecture.writes_outside_store,
        "relay_queue.store.claim",
        "from relay_queue.models import Job\nJob.objects.create()",
    ),
    *[
        (architecture.writes_outside_store, "relay_queue.lab.bench.bare", source)
        for source in (
            "COPY = 'INSERT INTO bare_job ({columns}) VALUES ({marks})'",
            "COPY = 'INSERT INTO bare_job SELECT 1'\nrun(copy.replace('relay_queue_', 'bare_'))",
            "COPY = 'SELECT id FROM {job} WHERE id = %s'",
            "COPY = f'the file goes into {folder}; update {name} and set it up'",
            '"""INSERT INTO relay_queue_job is for the store."""',
            "text = text.replace('update', '')",
        )
    ],
    (
        architecture.counts_by_hand,
        "relay_queue.store.queues",
        "def recount(tx):\n    tx.count('default', 'ready', 1)\nDROP = 'DELETE FROM relay_queue_queuecount'",
    ),
    (
        architecture.counts_by_hand,
        "relay_queue.store.transitions",
        "tx.count('default', 'ready', 1)",
    ),
    (architecture.counts_by_hand, "relay_queue.store.claim", "n = names.count('default')"),
    (architecture.hard_words, "relay_queue.clock", "# The oldest of the latest.\nX = 'anew'"),
    (architecture.prints_outside_cli, "relay_queue.cli.lab", "print('hello')"),
]


@pytest.mark.parametrize(
    ("rule", "name", "source"), KEPT, ids=[f"{rule.__name__}-{name}" for rule, name, _ in KEPT]
)
def test_rule_lets_honest_code_pass(
    rule: Callable[[Module], list[str]], name: str, source: str
) -> None:
    assert rule(Module(name, source)) == []


def package(**sources: str) -> list[Module]:
    """Return a package of modules of one line, and one whose name ends with ``_`` as a package."""
    top = Module("relay_queue", "", is_package=True)
    return [
        top,
        *(
            Module(f"relay_queue.{name.rstrip('_').replace('__', '.')}", source, name.endswith("_"))
            for name, source in sources.items()
        ),
    ]


@pytest.mark.parametrize(
    "modules",
    [
        package(a="from relay_queue import b", b="from relay_queue import a"),
        package(a="from relay_queue.b import f", b="import relay_queue.a"),
        package(a="from relay_queue import b", b="def f():\n    from relay_queue.a import g"),
        package(a="from . import b", b="if TYPE_CHECKING:\n    from relay_queue.a import A"),
        package(a="from . import b", b="from . import c", c="from . import a"),
        package(
            store_="from relay_queue.store.claim import claim",
            store__claim="from relay_queue.store import claim",
        ),
    ],
    ids=["each other", "by a name", "in a function", "for types", "of three", "by its package"],
)
def test_a_circle_of_files_is_found(modules: list[Module]) -> None:
    (found,) = architecture.circles(modules)
    assert found.count(" -> ") == len({*found.split(":")[0].split(" -> ")})


def test_each_circle_of_several_is_found() -> None:
    modules = package(
        a="from . import b", b="from . import a", c="from . import d", d="from . import c"
    )
    assert len(architecture.circles(modules)) == 2


def test_files_that_import_downwards_are_no_circle() -> None:
    modules = package(
        a="from . import b, c",
        b="from . import c",
        c="import os",
        store_="from relay_queue.store.claim import claim",
        store__claim="from relay_queue.store import records",
        store__records="",
    )
    assert architecture.circles(modules) == []


LONG = "x = 1\n" * 80


def test_a_short_module_that_only_one_other_imports_is_found() -> None:
    (found,) = architecture.too_short(package(a="from . import b", b="x = 1\n" * 79))
    assert found.startswith("relay_queue.b:1: 79 lines, and only relay_queue.a imports it")


@pytest.mark.parametrize(
    "modules",
    [
        package(a="from . import b", b=LONG),
        package(a="from . import b", b="", c="from . import b"),
        package(a="from . import signals", signals=""),
        package(
            worker_="",
            worker__loop="from relay_queue.worker.services import prune",
            worker__services_="",
            worker__services__prune="",
        ),
    ],
    ids=["long", "of two", "by nature", "a service"],
)
def test_a_module_may_be_short_or_have_one_importer(modules: list[Module]) -> None:
    assert architecture.too_short(modules) == []


def test_private_places_are_found_in_text() -> None:
    slash = "/"
    assert architecture.private_places("a.md", f"cd {slash}home/someone/project")
    assert architecture.private_places("a.md", "https://" + "pypi" + ".org/project")
    assert architecture.private_places("a.md", "see docs/home/page and work/life") == []
