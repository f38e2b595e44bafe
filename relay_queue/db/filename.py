"""The file that SQLite opens for a name in ``DATABASES``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from django.db import connections

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

URI = "file:"


def file_of(name: str) -> str | None:
    """Return the file that SQLite opens for ``name``; None for a database without one.

    A name that begins with ``file:`` is a URI. SQLite takes its path without the authority, the query
    and the fragment, and the last of several parameters of one name. A database in memory has no
    file, and neither has the temporary one of an empty name.
    """
    if name.startswith(URI):
        path, _, query = name.removeprefix(URI).partition("#")[0].partition("?")
        if path.startswith("//"):
            path = "/" + path[2:].partition("/")[2]
        given = dict(_parameters(query))
        if given.get("mode") == "memory" or given.get("vfs") == "memdb":
            return None
        name = _plain(path)
    return None if name in ("", ":memory:") else name


def database_path(using: str) -> str | None:
    """Return the path of the SQLite file behind alias `using`, or None if it has no file."""
    return file_of_connection(connections[using])


def file_of_connection(connection: BaseDatabaseWrapper) -> str | None:
    """Return the path of the SQLite file behind a connection, or None if it has no file."""
    # Only Django's SQLite connections answer this question, so only they can have a file.
    if not hasattr(connection, "is_in_memory_db"):
        return None
    return file_of(str(connection.settings_dict["NAME"] or ""))


def _parameters(query: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a query as SQLite reads them: a plus is no space."""
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        yield _plain(name), _plain(value)


def _plain(text: str) -> str:
    """Return a part of a URI without its percent signs; for SQLite it ends at a NUL."""
    return os.fsdecode(unquote_to_bytes(text)).partition("\0")[0]


def make_absolute(settings: dict[str, Any]) -> None:
    """Make a relative ``NAME`` in the settings of one SQLite database absolute, for good.

    The settings are shared by the connections of all threads. Later, after a function has changed
    the working directory, the same name would be another file for each new connection.
    """
    name = settings["NAME"]
    path = file_of(str(name or ""))
    if path is None or os.path.isabs(path):
        return
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return  # it was removed; opening the database says so
    if str(name).startswith(URI):
        # Only the beginning is new, so what is quoted stays as it is.
        settings["NAME"] = f"{URI}{_quoted(here)}/{str(name).removeprefix(URI)}"
    else:
        settings["NAME"] = type(name)(os.path.normpath(os.path.join(here, path)))


def make_all_absolute(connections: Iterable[Any]) -> None:
    """Do so for those of these Django connections that are SQLite's."""
    for connection in connections:
        if hasattr(connection, "is_in_memory_db"):  # only Django's SQLite connections answer this
            make_absolute(connection.settings_dict)


def _quoted(directory: str) -> str:
    """Return a directory as it stands in a URI of SQLite: only these three mean something there."""
    for character, code in (("%", "%25"), ("?", "%3f"), ("#", "%23")):
        directory = directory.replace(character, code)
    return directory.rstrip("/")
