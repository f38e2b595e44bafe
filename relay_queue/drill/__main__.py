"""``python -m relay_queue.drill ROW``: execute one row in the folder of the scratch settings.

Started by ``manage.py relay drill``. Writes the result as JSON. Ends, with its workers, when its
standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import django
from django.db import Error

from relay_queue.scratch import dependent

if TYPE_CHECKING:
    from relay_queue.drill.result import Result


def main(row: str) -> None:
    """Execute the row and write what came of it."""
    dependent.leave_with_parent()
    django.setup()
    result = _play(row)
    sys.stdout.write(json.dumps(result.as_data()) + "\n")
    sys.stdout.flush()


def _play(row: str) -> Result:
    from relay_queue.drill import rows, settings
    from relay_queue.drill.result import Result

    with ExitStack() as stack:
        try:
            stack.enter_context(_database())
        except Error as error:
            return Result(row, fault=f"no scratch database: {' '.join(str(error).split())}")
        return rows.play(row, Path(os.environ[settings.VARIABLE]))


def _database() -> AbstractContextManager[None]:
    """Make the database of the row where it is not a file, and drop it at the end."""
    from relay_queue.drill import settings
    from relay_queue.scratch.server import Server

    server = os.environ.get(settings.SERVER_VARIABLE)
    if server is None:
        return nullcontext()
    return Server.of_json(server).database(os.environ[settings.DATABASE_VARIABLE])


if __name__ == "__main__":
    main(*sys.argv[1:])
