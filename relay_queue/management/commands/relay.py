"""``manage.py relay VERB``: look at the queue and operate it."""

from __future__ import annotations

import argparse
from typing import Any, TextIO, cast

from django.core.management.base import BaseCommand, CommandParser

from relay_queue import __version__
from relay_queue.cli import base
from relay_queue.cli.output import Output


class Command(BaseCommand):
    """Finds the verb, parses its arguments and runs it."""

    help = "Look at the queue and operate it."
    # Verbs such as doctor and verify must also run in projects with faults.
    requires_system_checks = []
    # Django sets it when the command line is its own.
    _called_from_command_line: bool

    def get_version(self) -> str:
        """Return Relay's version, not Django's, for ``--version``."""
        return __version__

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the verb; the arguments behind it are for the verb's own parser."""
        parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the list of verbs
        parser.epilog = base.verb_list()
        parser.missing_args_message = f"Name a verb: {', '.join(base.VERBS)}."
        parser.add_argument("verb", metavar="VERB", type=base.verb_name, help="See below.")
        parser.add_argument(
            "arguments", metavar="...", nargs=argparse.REMAINDER, help="Arguments of the verb."
        )

    def handle(self, *, verb: str, arguments: list[str], **options: Any) -> None:
        """Run the verb; leave with its exit code if that is not 0."""
        seed = argparse.Namespace(**options)
        parsed = base.parse(verb, arguments, seed, command_line=self._called_from_command_line)
        # Django's wrapper adds a line end to each write, and a table writes its own.
        # The wrapper of stderr keeps adding them: Django writes the CommandError of a verb there.
        self.stdout.ending = ""
        out = Output(
            cast(TextIO, self.stdout),
            cast(TextIO, self.stderr),
            as_json=getattr(parsed, "json", False),
            color=not parsed.no_color,
        )
        code = base.run(verb, parsed, out)
        if code:
            raise SystemExit(code)
