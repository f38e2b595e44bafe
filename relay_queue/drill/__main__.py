"""``python -m relay_queue.drill ROW``: execute one row in the empty folder of the scratch settings.

Started by ``manage.py relay drill``. Writes the result as JSON. Ends, with its workers, when its
standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import django

from relay_queue.scratch import dependent


def main(row: str) -> None:
    """Execute the row and write what came of it."""
    dependent.leave_with_parent()
    django.setup()
    from relay_queue.drill import rows, settings

    result = rows.play(row, Path(os.environ[settings.VARIABLE]))
    sys.stdout.write(json.dumps(result.as_data()) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
