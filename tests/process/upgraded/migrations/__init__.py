"""All migrations there are, and one more."""

from relay_queue import migrations

RELEASED = list(migrations.__path__)
__path__ = [*RELEASED, *__path__]
