"""Tests on every supported pair of Python and Django: ``nox -f .ci/noxfile.py``.

Each session installs the package as a user would, from ``pyproject.toml``. Interpreters that are
not on this machine are skipped by name.
"""

from pathlib import Path

import nox

# Nox works in the directory of this file; everything else is named from the root.
ROOT = Path(__file__).resolve().parent.parent

nox.options.envdir = str(ROOT / ".nox")
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

# Django 6 needs Python 3.12; 5.2 is the last one for Python 3.11.
PAIRS = [
    ("3.11", "5.2"),
    ("3.12", "5.2"),
    ("3.12", "6.0"),
    ("3.13", "6.0"),
    ("3.13", "6.1"),
    ("3.14", "6.1"),
]


@nox.session
@nox.parametrize(
    ("python", "django"), PAIRS, ids=[f"py{python}-django{django}" for python, django in PAIRS]
)
def tests(session: nox.Session, django: str) -> None:
    """Run the test suite."""
    session.chdir(ROOT)
    extras = "dev,metrics,rich" + (",backport" if django == "5.2" else "")
    session.install(f"Django=={django}.*", "-e", f".[{extras}]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, layout and types with the pinned tools."""
    session.chdir(ROOT)
    session.install("-r", "requirements.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
