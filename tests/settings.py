"""Settings of the test suite.

``RELAY_TEST_DB`` names the database: a file, or a ``postgresql://`` address. Fixtures set it for
the processes they start, so that a test and its workers share one. Without it, the suite uses a
directory of its own that is removed at exit.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import django

from relay_project.csp import POLICY


def _scratch_directory() -> Path:
    """Make a directory for this process's databases, removed when this process exits."""
    directory = Path(tempfile.mkdtemp(prefix="relay-tests-"))
    owner = os.getpid()

    def remove() -> None:
        # A forked child runs the same exit handlers: it must not take the parent's files away.
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def _sqlite(database: Path) -> dict[str, Any]:
    return {
        "ENGINE": "relay_queue.db.sqlite3",
        "NAME": database,
        # A file, never memory: other processes must be able to open the test database. Under
        # pytest-xdist each worker is its own process, with its own directory and its own suffix.
        "TEST": {"NAME": str(database.with_name("test.sqlite3"))},
    }


def _postgresql(address: str) -> dict[str, Any]:
    parts = urlsplit(address)
    query = dict(parse_qsl(parts.query))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.strip("/"),
        "USER": parts.username or "",
        "HOST": query["host"],
        "PORT": query["port"],
    }


_named = os.environ.get("RELAY_TEST_DB") or str(_scratch_directory() / "relay.sqlite3")

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "only-for-tests"
DEBUG = False
ALLOWED_HOSTS = ["testserver", "localhost", "127.0.0.1"]
ROOT_URLCONF = "tests.urls"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "relay_project" / "static"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The fastest hasher Django has: no test is about the strength of a password.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

DATABASES: dict[str, dict[str, Any]] = {
    "default": _postgresql(_named) if _named.startswith("postgresql:") else _sqlite(Path(_named))
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rangefilter",
    "relay_queue",
    "tests",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")

# The policy of the reference project, so that a browser refuses here what it would refuse there.
SECURE_CSP = POLICY

MIDDLEWARE = [
    "relay_project.csp.content_security_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

TASKS: dict[str, dict[str, Any]] = {
    "default": {
        "BACKEND": "relay_queue.backend.RelayBackend",
        # An empty list means that any queue name is accepted.
        "QUEUES": [],
    }
}

RELAY: dict[str, Any] = {}
