"""Settings of the reference project.

Safe as they stand: debug is off, only loopback names are answered, and the secret key is made on
the first run and kept outside the repository. Each of these variables changes one thing:

=====================  ==============================================================
``RELAY_VAR``          directory for everything the project writes, for its user alone; ``var/``
                       by default
``RELAY_DB``           the database file; ``relay.sqlite3`` in that directory by default
``RELAY_SECRET_KEY``   the secret key; else one is generated into that directory
``RELAY_DEBUG``        ``1`` turns Django's debug pages on
``RELAY_HOSTS``        host names to answer, separated by commas
``RELAY_ORIGINS``      origins trusted for forms behind a proxy, such as ``https://a.example``
``RELAY_HTTPS``        ``1`` when all visitors come by HTTPS: cookies are then never sent without
``RELAY_LOG_LEVEL``    ``INFO`` by default
=====================  ==============================================================
"""

import os
import stat
import tempfile
from pathlib import Path

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management.utils import get_random_secret_key

from relay_project.csp import POLICY

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = Path(os.environ.get("RELAY_VAR", BASE_DIR / "var"))
# Jobs, passwords' hashes and sessions are in there: what the project writes is its user's alone.
os.umask(os.umask(0o077) | 0o077)
VAR_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)


def _switch(name: str) -> bool:
    """Read an environment variable that is on or off."""
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


def _names(name: str, default: str = "") -> list[str]:
    """Read an environment variable that lists names between commas."""
    return [part.strip() for part in os.environ.get(name, default).split(",") if part.strip()]


def _secret_key(path: Path) -> str:
    """Return the key in ``path``; make one that only this user can read if there is none."""
    if not path.exists():
        # Processes that start together must agree on one key, so the file appears whole and the
        # first one to link it wins.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(get_random_secret_key())
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    with path.open() as file:
        _refuse_foreign_key(path, os.fstat(file.fileno()))
        return file.read()


def _refuse_foreign_key(path: Path, status: os.stat_result) -> None:
    """Raise ``ImproperlyConfigured`` if somebody else can choose the key, and so forge sessions."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        reason = f"belongs to user {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise ImproperlyConfigured(
        f"The secret key file {path} {reason}. Delete it, so that a new one is made, or set "
        "RELAY_SECRET_KEY."
    )


# --- Security ------------------------------------------------------------------

SECRET_KEY = os.environ.get("RELAY_SECRET_KEY") or _secret_key(VAR_DIR / "secret_key")
DEBUG = _switch("RELAY_DEBUG")
ALLOWED_HOSTS = _names("RELAY_HOSTS", "127.0.0.1,localhost,[::1]")
CSRF_TRUSTED_ORIGINS = _names("RELAY_ORIGINS")

HTTPS = _switch("RELAY_HTTPS")
SESSION_COOKIE_SECURE = HTTPS
CSRF_COOKIE_SECURE = HTTPS
SECURE_HSTS_SECONDS = 3600 if HTTPS else 0

SECURE_CSP = POLICY

# --- Applications --------------------------------------------------------------

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rangefilter",
    "relay_queue",
    "relay_project",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.csp.ContentSecurityPolicyMiddleware"
    if django.VERSION >= (6, 0)
    else "relay_project.csp.content_security_policy",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "relay_project.urls"
WSGI_APPLICATION = "relay_project.wsgi.application"

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

# --- Database and jobs ---------------------------------------------------------

DATABASES = {
    "default": {
        # Write-ahead log, full durability and fair writers come with the engine.
        "ENGINE": "relay_queue.db.sqlite3",
        "NAME": Path(os.environ.get("RELAY_DB", VAR_DIR / "relay.sqlite3")),
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Named once for both: Django refuses a task on any other queue, and `migrate` creates these.
_queues: dict[str, dict[str, int]] = {
    "default": {},
    "mail": {"capacity": 1_000},
    "reports": {},
    "media": {"max_running": 4},
}

TASKS = {"default": {"BACKEND": "relay_queue.backend.RelayBackend", "QUEUES": list(_queues)}}

RELAY = {"QUEUES": _queues}

# --- People, languages and files -----------------------------------------------

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = VAR_DIR / "static"
# The web server reads them as the project's user; `collectstatic` would open them to everybody.
FILE_UPLOAD_PERMISSIONS = 0o600
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedStaticFilesStorage"},
}

# --- Logging -------------------------------------------------------------------

_level = os.environ.get("RELAY_LOG_LEVEL", "INFO").upper()

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "{asctime} {levelname} {name} [{process}] {message}", "style": "{"}
    },
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    "loggers": {
        "django": {"handlers": ["console"], "level": _level, "propagate": False},
        "relay_queue": {"handlers": ["console"], "level": _level, "propagate": False},
        # Two lines for each job are too many; failures are logged as errors.
        "django.tasks": {"handlers": ["console"], "level": "WARNING", "propagate": False},
        "django_tasks": {"handlers": ["console"], "level": "WARNING", "propagate": False},
        "relay_project": {"handlers": ["console"], "level": _level, "propagate": False},
    },
}
