"""Whether anybody looks at the statements of a connection, as Django lets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def is_watched(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the query log or a wrapper, as of ``assertNumQueries``, wants each statement.

    Then all of them must go through Django's own cursor, BEGIN and COMMIT, too.
    """
    return connection.queries_logged or bool(connection.execute_wrappers)
