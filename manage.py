#!/usr/bin/env python
"""Run a management command of the reference project."""

import os
import sys

from relay_queue.startup import stop_while_starting

if "runworker" in sys.argv[1:2]:
    # Before everything that takes long to import: as a container's first program, this process
    # would not even notice a stop without it.
    stop_while_starting()

from django.core.management import execute_from_command_line


def main() -> None:
    """Hand the command line to Django, with the reference project's settings by default."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "relay_project.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
