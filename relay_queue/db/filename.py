"""The file that SQLite opens for a name in ``DATABASES``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

URI = "file:"


def file_of(name: str) -> str | None:
    """Return the file that SQLite would open for ``name``, or None for a database in memory."""
    if name.startswith(URI):
        path, _, query = name.removeprefix(URI).partition("#")[0].partition("?")
        if path.startswith("//"):
            path = "/" + path[2:].partition("/")[2]
        if "mode=memory" in query or "vfs=memdb" in query:
            return None
        name = unquote(path)
    return None if name in ("", ":memory:") else name


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
