"""The built package holds what users need, and its numbers agree with each other."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import relay_queue

ROOT = Path(__file__).resolve().parent.parent

_found = importlib.util.spec_from_file_location(
    "package_metadata", ROOT / ".ci/package_metadata.py"
)
package_metadata = importlib.util.module_from_spec(_found)
_found.loader.exec_module(package_metadata)

# What a user of the wheel runs: no file of this repository is on the path.
USER_PROJECT = """
import django
from django.conf import settings

settings.configure(
    SECRET_KEY="x",
    USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "relay_queue"],
    DATABASES={"default": {"ENGINE": "relay_queue.db.sqlite3", "NAME": "user.sqlite3"}},
    TASKS={"default": {"BACKEND": "relay_queue.backend.RelayBackend"}},
)
django.setup()

from django.core.management import call_command

import relay_queue
from relay_queue.models import Job

call_command("migrate", verbosity=0)
print(relay_queue.__file__, Job.objects.count())
"""


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line.rstrip("\\")) for line in lines if line[:1].isalnum()]


@pytest.mark.parametrize(
    ("lock", "source"),
    [("requirements.txt", ".ci/requirements.in"), (".ci/tools.txt", ".ci/tools.in")],
)
def test_every_package_of_a_lock_is_pinned_and_has_the_hash_of_a_file(
    lock: str, source: str
) -> None:
    blocks = (ROOT / lock).read_text().replace("\\\n", "").splitlines()
    locked = [block.split("--hash=sha256:") for block in blocks if block[:1].isalnum()]
    assert [block[0] for block in locked if "==" not in block[0] or len(block) == 1] == []
    assert all(len(digest.strip()) == 64 for block in locked for digest in block[1:])
    names = {Requirement(block[0]).name.lower() for block in locked}
    wanted = [line for line in (ROOT / source).read_text().splitlines() if line[:1].isalnum()]
    missing = {Requirement(line).name.lower().replace("_", "-") for line in wanted} - names
    assert not missing, "run `make lock`"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(directory.glob("*.whl"))


@pytest.mark.slow
def test_wheel_is_named_after_the_package_and_its_one_version(wheel: Path) -> None:
    assert wheel.name == f"django_relay_queue-{relay_queue.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    skipped = {".pyc", ".po"}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "relay_queue").rglob("*")
        if path.is_file() and path.suffix not in skipped
    }
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    held = {name for name in names if Path(name).suffix not in skipped}
    assert held == wanted
    assert "relay_queue/py.typed" in held
    assert any(name.startswith("relay_queue/migrations/0001_") for name in held)


@pytest.mark.slow
def test_wheel_works_in_a_project_of_its_own(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DJANGO")}
    done = subprocess.run(
        [sys.executable, "-c", USER_PROJECT],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "relay_queue" / "__init__.py"), "0"]


@pytest.mark.slow
def test_the_readme_of_the_package_has_no_link_that_ends_outside_of_the_repository(
    wheel: Path,
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        head, _, readme = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert readme.startswith("# Relay\n")
    assert "Each job has a page with its way through the states" in readme, "a link is its text"
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert len(readme) > 0.8 * len((ROOT / "README.md").read_text())


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    subprocess.run([*build, "-t", "wheel"], cwd=source, capture_output=True, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as new, zipfile.ZipFile(wheel) as old:
        assert new.namelist() == old.namelist()
        assert [info.CRC for info in new.infolist()] == [info.CRC for info in old.infolist()]


def test_with_an_address_the_readme_and_the_urls_of_the_package_lead_there() -> None:
    address = "https://code.example/relay/relay"
    text = "See [the docs](docs/api.md#names).\n\n\n![A job](docs/images/job.webp) [Django](https://x.example)"
    assert package_metadata.portable(text, address, "v1.2.3") == (
        f"See [the docs]({address}/blob/v1.2.3/docs/api.md#names).\n\n"
        f"![A job]({address}/raw/v1.2.3/docs/images/job.webp) [Django](https://x.example)"
    )
    urls = package_metadata.urls(address)
    assert urls["Source"] == address
    assert all(url.startswith(address) for url in urls.values())
    for url in urls.values():
        path = url.partition("/HEAD/")[2]
        assert not path or (ROOT / path).is_file()
    assert package_metadata.urls("") == {}
    with pytest.raises(ValueError, match=r"'http://x'; use one that begins with https://"):
        package_metadata.urls("http://x")


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", relay_queue.__version__)


def test_every_requirement_is_pinned(pins: list[Requirement]) -> None:
    loose = [str(pin) for pin in pins if [item.operator for item in pin.specifier] != ["=="]]
    assert not loose


@pytest.mark.parametrize(
    ("python", "django"), [("3.11", "5.2"), ("3.12", "6."), ("3.13", "6."), ("3.14", "6.")]
)
def test_pins_choose_a_supported_django_for_each_python(
    pins: list[Requirement], pyproject: dict, python: str, django: str
) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    chosen = {
        pin.name.lower(): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(environment)
    }
    assert chosen["django"].startswith(django)
    assert ("django-tasks" in chosen) == (django == "5.2")
    for text in pyproject["project"]["dependencies"]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            assert chosen[wanted.name.lower()] in wanted.specifier, text


def test_pins_satisfy_every_extra_they_cover(pins: list[Requirement], pyproject: dict) -> None:
    pinned = {pin.name.lower().replace("_", "-"): str(pin.specifier)[2:] for pin in pins}
    extras = pyproject["project"]["optional-dependencies"]
    for text in [*extras["dev"], *extras["rich"], *extras["metrics"]]:
        wanted = Requirement(text)
        assert pinned[wanted.name.lower()] in wanted.specifier, text
