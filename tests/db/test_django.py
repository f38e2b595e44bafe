"""Django's own behaviour through the engine, in a project of its own and its own processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
import os
from pathlib import Path

BASE = Path(__file__).resolve().parent
SECRET_KEY = "x"
USE_TZ = True
ROOT_URLCONF = "site_urls"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
MIGRATION_MODULES = {}
DATABASES = {
    alias: {
        "ENGINE": "relay_queue.db.sqlite3",
        "NAME": os.environ["NAME"].format(alias) if "NAME" in os.environ else BASE / f"{alias}.db",
        "OPTIONS": {"timeout": 5},
        "ATOMIC_REQUESTS": alias == "default",
        "TEST": {"NAME": str(BASE / f"test_{alias}.db") if os.environ.get("FILES") else None},
    }
    for alias in ("default", "other")
}
"""

MODELS = """
from django.db import models

class Author(models.Model):
    name = models.CharField(max_length=50, unique=True)

class Book(models.Model):
    author = models.ForeignKey(Author, models.CASCADE)
    title = models.CharField(max_length=50)
"""

URLS = """
from django.http import HttpResponse
from django.urls import path
from shop.models import Author

def save_and_fail(request):
    Author.objects.create(name="lost")
    raise ZeroDivisionError

def save(request):
    Author.objects.create(name="kept")
    return HttpResponse("ok")

urlpatterns = [path("fail/", save_and_fail), path("save/", save)]
"""

TESTS = """
import threading
from django.db import connection, connections, transaction
from django.test import Client, TestCase, TransactionTestCase
from shop.models import Author, Book

class Usual(TestCase):
    databases = {"default", "other"}

    @classmethod
    def setUpTestData(cls):
        cls.author = Author.objects.create(name="setup")

    def test_each_test_starts_from_the_class_data(self):
        self.assertEqual(Author.objects.count(), 1)
        Author.objects.create(name="one")

    def test_each_test_starts_from_the_class_data_again(self):
        self.assertEqual(Author.objects.count(), 1)
        Author.objects.using("other").create(name="one")

    def test_a_durable_block_may_stand_inside_a_test_case(self):
        with transaction.atomic(durable=True):
            Author.objects.create(name="one")

    def test_on_commit_runs_when_captured(self):
        done = []
        with self.captureOnCommitCallbacks(execute=True):
            transaction.on_commit(lambda: done.append(1))
        self.assertEqual(done, [1])

    def test_a_request_that_fails_is_rolled_back(self):
        client = Client(raise_request_exception=False)
        self.assertEqual(client.get("/fail/").status_code, 500)
        self.assertEqual(client.get("/save/").status_code, 200)
        self.assertEqual(
            list(Author.objects.order_by("id").values_list("name", flat=True)), ["setup", "kept"]
        )

class Real(TransactionTestCase):
    def test_commits_are_real_and_flushed_afterwards(self):
        self.assertEqual(Author.objects.count(), 0)
        done = []
        with transaction.atomic():
            Author.objects.create(name="one")
            transaction.on_commit(lambda: done.append(1))
            self.assertEqual(done, [])
        self.assertEqual(done, [1])

    test_commits_again = test_commits_are_real_and_flushed_afterwards

    def test_other_threads_see_the_test_database(self):
        Author.objects.create(name="one")
        seen = []
        def look():
            seen.append(Author.objects.count())
            connections.close_all()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        self.assertEqual(seen, [1])
"""

Run = Callable[..., str]


def write_site(directory: Path) -> Path:
    """Write a small project: two databases, two models, two views."""
    (directory / "shop").mkdir()
    for name, text in {
        "site_settings.py": SETTINGS,
        "site_urls.py": URLS,
        "shop/__init__.py": "",
        "shop/models.py": MODELS,
        "shop/tests.py": TESTS,
    }.items():
        (directory / name).write_text(text)
    return directory


def run_in(site: Path, *arguments: str, **environment: str) -> str:
    """Run Python in a project and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=site,
        env={
            **{name: text for name, text in os.environ.items() if not name.startswith("PYTEST")},
            "DJANGO_SETTINGS_MODULE": "site_settings",
            "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a project without migrations or databases."""
    return write_site(tmp_path)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with both databases migrated, to be copied."""
    site = write_site(tmp_path_factory.mktemp("template"))
    (site / "shop" / "migrations").mkdir()
    (site / "shop" / "migrations" / "__init__.py").touch()
    run_in(site, "-m", "django", "makemigrations", "shop")
    for alias in ("default", "other"):
        run_in(site, "-m", "django", "migrate", "--database", alias, "--verbosity", "0")
    return site


@pytest.fixture
def migrated(template: Path, tmp_path: Path) -> Path:
    """Return a project of this test's own with both databases migrated."""
    return shutil.copytree(template, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs Python in the project."""
    return partial(run_in, tmp_path)


@pytest.fixture
def django(tmp_path: Path) -> Run:
    """Return a function that runs a management command in the project."""
    return partial(run_in, tmp_path, "-m", "django")


SETUP = "import django; django.setup()\nfrom shop.models import Author, Book\n"


def test_a_migrated_file_migrates_back_and_forth(migrated: Path, django: Run) -> None:
    assert "Unapplying shop.0001_initial... OK" in django("migrate", "shop", "zero")
    assert "Applying shop.0001_initial... OK" in django("migrate", "shop")


def test_tables_are_remade_and_inspected(migrated: Path, django: Run) -> None:
    models = migrated / "shop" / "models.py"
    remade = models.read_text().replace("max_length=50, unique=True", "max_length=60")
    models.write_text(remade + "    pages = models.IntegerField(default=3)\n")
    django("makemigrations", "shop")
    django("migrate", "shop")
    inspected = django("inspectdb", "shop_author", "shop_book")
    assert "name = models.CharField(max_length=60)" in inspected
    assert "pages = models.IntegerField()" in inspected
    assert "models.ForeignKey(ShopAuthor" in inspected


def test_data_is_dumped_flushed_and_loaded(migrated: Path, run: Run) -> None:
    out = run(
        "-c",
        SETUP
        + """
from django.core.management import call_command
author = Author.objects.create(name="Ann")
Book.objects.create(author=author, title="B")
call_command("dumpdata", "shop", output="dump.json")
call_command("flush", interactive=False, verbosity=0)
print(Book.objects.count())
call_command("loaddata", "dump.json", verbosity=0)
print(Book.objects.get().author.name)
""",
    )
    assert out.split() == ["0", "Ann"]


def test_the_orm_works_outside_transactions(migrated: Path, run: Run) -> None:
    """Bulk writes use RETURNING in autocommit; the iterator reads in chunks while others write."""
    out = run(
        "-c",
        SETUP
        + """
import json
from django.db import connection
created = Author.objects.bulk_create(Author(name=f"a{i}") for i in range(250))
ids = [author.pk for author in created]
seen = []
for author in Author.objects.order_by("pk").iterator(chunk_size=10):
    seen.append(author.pk)
    Author.objects.filter(pk=author.pk).update(name=f"b{author.pk}")
got, made = Author.objects.get_or_create(name="new")
deleted, _ = Author.objects.filter(pk__lte=10).delete()
raw = [a.name for a in Author.objects.raw("SELECT * FROM shop_author WHERE id = %s", [11])]
with connection.cursor() as cursor:
    cursor.execute("SELECT id FROM shop_author ORDER BY id")
    some = [cursor.fetchone(), *cursor.fetchmany(2)]
print(json.dumps([ids == seen, len(ids), made, deleted, raw, len(some), connection.permit]))
""",
    )
    assert json.loads(out) == [True, 250, True, 10, ["b11"], 3, None]


def test_debug_logs_every_query_once(migrated: Path, run: Run) -> None:
    out = run(
        "-c",
        SETUP
        + """
import json
from django.db import connection, transaction
connection.force_debug_cursor = True
with transaction.atomic():
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO shop_author (name) VALUES (%s)", ["x"])
        cursor.executemany("INSERT INTO shop_author (name) VALUES (%s)", [["y"], ["z"]])
with connection.cursor() as cursor:
    cursor.execute("UPDATE shop_author SET name = name")
print(json.dumps([query["sql"] for query in connection.queries]))
""",
    )
    assert json.loads(out) == [
        "BEGIN IMMEDIATE",
        "INSERT INTO shop_author (name) VALUES ('x')",
        "2 times: INSERT INTO shop_author (name) VALUES (%s)",
        "COMMIT",
        "UPDATE shop_author SET name = name",
    ]


def test_two_databases_have_gates_of_their_own(migrated: Path, run: Run) -> None:
    out = run(
        "-c",
        SETUP
        + """
from django.db import connections, transaction
from relay_queue.db.gate import gate_of
gates = [gate_of(connections[alias]) for alias in ("default", "other")]
with transaction.atomic():
    Author.objects.create(name="one")
    with transaction.atomic(using="other"):
        Author.objects.using("other").create(name="two")
        print([gate.held_by_this_thread() for gate in gates], gates[0] is gates[1])
    print([gate.held_by_this_thread() for gate in gates])
print([gate.held_by_this_thread() for gate in gates])
""",
    )
    assert out.splitlines() == ["[True, True] False", "[True, False]", "[False, False]"]


@pytest.mark.parametrize("environment", [{}, {"FILES": "1"}], ids=["memory", "files"])
@pytest.mark.parametrize("parallel", ["1", "2"], ids=["alone", "parallel"])
def test_djangos_test_runner_works(
    site: Path, django: Run, environment: dict[str, str], parallel: str
) -> None:
    out = django("test", "--parallel", parallel, "--noinput", **environment)
    assert "OK" in out
    assert not [path.name for path in site.glob("*.db*")]


@pytest.mark.parametrize(
    ("processes", "environment"),
    [
        ("0", {}),
        ("2", {}),
        ("2", {"NAME": "{}.db"}),
        ("2", {"NAME": "./{}.db"}),
        ("2", {"NAME": "file:{}.db"}),
        ("2", {"FILES": "1"}),
    ],
    ids=["alone", "absolute", "relative", "with a dot", "uri", "files"],
)
def test_pytest_django_works_without_a_setting(
    site: Path, run: Run, environment: dict[str, str], processes: str
) -> None:
    arguments = ("-m", "pytest", "-n", processes, "-p", "no:cacheprovider", "shop/tests.py")
    assert "8 passed" in run(*arguments, **environment)
    assert not [path.name for path in site.rglob("*.db*")]


def test_a_name_of_a_test_database_that_was_chosen_is_kept(site: Path, run: Run) -> None:
    out = run(
        "-c",
        SETUP
        + """
import os
from django.db import connection
os.mkdir("test_var")
base = connection.settings_dict["NAME"]
for name in ("test_default.db_gw0", "test_var/default.db_gw0", "/srv/test_x_gw0", f"test_{base}_gw0"):
    connection.settings_dict["TEST"]["NAME"] = name
    print(connection.creation._get_test_db_name())
""",
    )
    memory = "file:memorydb_default?mode=memory&cache=shared"
    kept = ["test_default.db_gw0", "test_var/default.db_gw0", "/srv/test_x_gw0"]
    assert out.splitlines() == [*kept, memory]


def test_folders_of_workers_go_with_their_test_database_but_not_what_a_link_leads_to(
    site: Path, run: Run
) -> None:
    kept = site / "kept"
    kept.mkdir()
    (kept / "file").touch()
    run(
        "-c",
        SETUP
        + """
import os
from django.db import connection
connection.creation.create_test_db(verbosity=0)
os.mkdir("test_default.db-workers")
open("test_default.db-workers/0a", "w").close()
os.symlink("kept", "test_default.db-bells")
connection.creation.destroy_test_db("default.db", verbosity=0)
""",
        FILES="1",
    )
    assert not (site / "test_default.db-workers").exists()
    assert (kept / "file").exists()


def test_a_gate_goes_with_its_test_database_and_comes_back_with_the_next(
    site: Path, run: Run
) -> None:
    out = run(
        "-c",
        SETUP
        + """
import glob, fcntl
from django.db import connection, transaction
for _ in range(2):
    connection.creation.create_test_db(verbosity=0)
    with transaction.atomic():
        Author.objects.create(name="one")
        with open("test_default.db-gate") as gate:
            try: fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError: print("held")
    connection.creation.destroy_test_db("default.db", verbosity=0)
    print(sorted(glob.glob("*.db*")))
""",
        FILES="1",
    )
    assert out.splitlines() == ["held", "[]"] * 2


def test_an_interrupted_run_is_cleaned_up_and_kept_databases_are_reused(
    site: Path, django: Run
) -> None:
    for name in ("test_default.db", "test_default.db-wal", "test_default.db-shm"):
        (site / name).write_bytes(b"left behind")
    assert "OK" in django("test", "shop.tests.Usual", "--noinput", FILES="1")
    keep = ("--keepdb", "--parallel", "2")
    for _ in range(2):
        assert "OK" in django("test", "shop.tests.Usual", *keep, FILES="1")


def test_a_clone_holds_what_is_only_in_the_log(migrated: Path, run: Run) -> None:
    out = run(
        "-c",
        SETUP
        + """
import sqlite3
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("PRAGMA wal_autocheckpoint=0")
Author.objects.create(name="in the log")
connection.creation.clone_test_db("copy", verbosity=0)
clone = connection.creation.get_test_db_clone_settings("copy")["NAME"]
print(sqlite3.connect(clone).execute("SELECT name FROM shop_author").fetchall())
""",
    )
    assert out.strip() == "[('in the log',)]"
