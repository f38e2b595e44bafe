"""Running verbs of ``manage.py relay`` in the test's own process."""

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from django.core.management import call_command


class Answer(NamedTuple):
    """What a verb left behind: its exit code and what it wrote."""

    code: int
    text: str
    errors: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)


@pytest.fixture
def relay() -> Callable[..., Answer]:
    """Return a function that runs one verb with its arguments."""

    def run(*arguments: object) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        code = 0
        try:
            call_command("relay", *map(str, arguments), stdout=out, stderr=err)
        except SystemExit as left:
            code = int(left.code or 0)
        return Answer(code, out.getvalue(), err.getvalue())

    return run
