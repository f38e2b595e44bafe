"""``python -m relay_queue.drill ROW``: execute one row in the folder of the scratch settings.

Started by ``manage.py relay drill``. Writes the result as JSON. Ends, with its workers, when its
standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import django

from relay_queue.scratch import dependent


def main(row: str) -> None:
    """Execute the row and write what came of it."""
    dependent.leave_with_parent()
    django.setup()
    from relay_queue.drill import rows, settings

    with _database():
        result = rows.play(row, Path(os.environ[settings.VARIABLE]))
    sys.stdout.write(json.dumps(result.as_data()) + "\n")
    sys.stdout.flush()


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
