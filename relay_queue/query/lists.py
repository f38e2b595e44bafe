"""Long lists: rows of a table in the order of one index, from any place in it, in either direction.

A page costs what its rows cost, wherever in the list it lies. Conditions that the index cannot
decide are checked row by row, for at most `SCAN` rows a page. A rare match among millions is then
found in several pages, each of them quick.

`list_plans` chooses the index for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from django.db.models import QuerySet
from django.db.models.expressions import RawSQL

from relay_queue import conf
from relay_queue.query import reads

SCAN: Final = 10_000
"""Rows that are read for the matches of one page."""
COUNT_SCAN: Final = 5_000
"""Rows that are read for a count, and the largest count."""

MOST_PAIRS: Final = 300
"""Pairs of a queue and a task that are read; each costs one probe of the index."""

QUEUES_AND_TASKS: Final = f"""
    WITH RECURSIVE pair (queue, task) AS (
        SELECT q.name, (SELECT MIN(task) FROM relay_queue_job WHERE queue = q.name)
        FROM relay_queue_queue q
        UNION ALL
        SELECT pair.queue, (SELECT MIN(j.task) FROM relay_queue_job j
                            WHERE j.queue = pair.queue AND j.task > pair.task)
        FROM pair WHERE pair.task IS NOT NULL
    )
    SELECT queue, task FROM pair LIMIT {2 * MOST_PAIRS + 1}
"""
"""Find each queue with each of its tasks; a queue also comes once without a task.

The statement skips along an index instead of reading the jobs.
"""

LOOKED_AT_FOR_NAME: Final = 100
"""The newest jobs of a queue and a task that are checked for one that a person may see."""

SEEN: Final = """
    SELECT 1 WHERE EXISTS (SELECT 1 FROM (
        SELECT id FROM relay_queue_job WHERE queue = %s AND task = %s
        ORDER BY created_at DESC, id DESC LIMIT {most}) s WHERE EXISTS ({seen}))
"""
"""Check whether one of the newest jobs of a queue and a task may be seen."""


class Place(NamedTuple):
    """A place in a list: the sort key, as the database writes it, and the id."""

    key: Any
    id: int


class Branch(NamedTuple):
    """One stretch of an index: a condition and its parameters."""

    where: str
    params: Sequence[Any] = ()


class Counted(NamedTuple):
    """How many rows there are, and whether there may be more."""

    n: int
    more: bool


@dataclass(frozen=True, slots=True)
class IndexScan:
    """Which index is read, and from which end.

    Several branches are merged by the key. ``covers`` names the criteria that the branches decide.
    ``gather`` sorts the rows of branches that no index has in the order of the key.
    """

    table: str
    branches: tuple[Branch, ...]
    key: str = "id"
    id: str = "id"
    descending: bool = True
    covers: frozenset[str] = frozenset()
    gather: bool = False
    distinct: bool = False

    @property
    def numeric(self) -> bool:
        """Whether the key is a number; else it is a time."""
        return self.key in {self.id, "rank"}

    def statement(
        self, place: Place | None, limit: int, *, forward: bool = True, inclusive: bool = True
    ) -> tuple[str, list[Any]]:
        """Return the statement for the next ids and keys from a place on.

        Each of several branches has an order and a limit of its own where the database needs it;
        see `Dialect.bounds_branches`.
        """
        down = self.descending == forward
        order = "DESC" if down else "ASC"
        sign = ("<" if down else ">") + ("=" if inclusive else "")
        parts: list[str] = []
        params: list[Any] = []
        for branch in self.branches:
            where = branch.where
            params += branch.params
            if place is not None and self.key == self.id:
                where += f" AND {self.id} {sign} %s"
                params.append(place.id)
            elif place is not None:
                where += f" AND ({self.key}, {self.id}) {sign} (%s, %s)"
                params += place
            distinct = "DISTINCT " if self.distinct else ""
            parts.append(
                f"SELECT {distinct}{self.id} AS id, {self.key} AS k FROM {self.table} WHERE {where}"
            )
        end = f" ORDER BY 2 {order}, 1 {order} LIMIT {limit}"
        if len(parts) > 1 and not self.gather and reads.dialect().bounds_branches:
            parts = [f"({part}{end})" for part in parts]
        sql = " UNION ALL ".join(parts)
        if self.gather:
            # The sum with 0 hides the index from the planner, which would else read the whole table
            # by id for the order.
            sql = f"SELECT id, k FROM ({sql}) gathered"
            return f"{sql} ORDER BY k + 0 {order} LIMIT {limit}", params
        return f"{sql}{end}", params


@dataclass(frozen=True, slots=True)
class ScanReader:
    """Reads an index scan; ``rest`` has the rows that meet what its branches do not decide.

    Without a ``rest`` the branches decide everything.
    """

    scan: IndexScan
    rest: QuerySet[Any] | None = None

    def read(
        self,
        place: Place | None,
        *,
        limit: int,
        skip: int = 0,
        forward: bool = True,
        inclusive: bool = True,
    ) -> list[Place]:
        """Return up to ``limit`` places after the first ``skip``, in the direction of the scan."""
        read = skip + limit if self.rest is None else SCAN
        inner, params = self.scan.statement(place, read, forward=forward, inclusive=inclusive)
        where, more = self._rest()
        # The order of the inner rows is kept: only so can the scan stop at the last one wanted.
        sql = f"SELECT s.id, s.k FROM ({inner}) s{where} LIMIT {limit} OFFSET {skip}"
        found = [Place(key, pk) for pk, key in reads.rows(sql, *params, *more)]
        return found if forward else found[::-1]

    def unseen(self, place: Place | None) -> Place | None:
        """Return the first place behind the rows that `read` checks, going forward, or None."""
        if self.rest is None:
            return None
        inner, params = self.scan.statement(place, SCAN + 1)
        sql = f"SELECT s.id, s.k FROM ({inner}) s LIMIT 1 OFFSET {SCAN}"
        found = reads.rows(sql, *params)
        return Place(found[0][1], found[0][0]) if found else None

    def count(self) -> Counted:
        """Count the rows, as far as `COUNT_SCAN` goes."""
        inner, params = self.scan.statement(None, COUNT_SCAN + 1)
        where, more = self._rest("CASE WHEN", "THEN 1 ELSE 0 END")
        matched = f"COALESCE(SUM({where}), 0)" if where else "COUNT(*)"
        sql = f"SELECT COUNT(*), {matched} FROM ({inner}) s"
        ((looked_at, n),) = reads.rows(sql, *more, *params)
        return Counted(min(int(n), COUNT_SCAN), looked_at > COUNT_SCAN)

    def _rest(self, before: str = " WHERE", after: str = "") -> tuple[str, list[Any]]:
        if self.rest is None:
            return "", []
        sql, params = _is_among(self.rest)
        return f"{before} EXISTS ({sql}) {after}".rstrip(), params


@dataclass(frozen=True, slots=True)
class Names:
    """The queues, and the pairs of a queue and a task that have jobs, in the order of their names.

    ``cut_short`` says that there are more pairs than `MOST_PAIRS`.
    """

    queues: list[str]
    pairs: list[tuple[str, str]]
    cut_short: bool = False

    @property
    def tasks(self) -> list[str]:
        """The tasks that have jobs."""
        return sorted({task for _, task in self.pairs})


def read_names() -> Names:
    """Read the names: one statement for any number of jobs."""
    rows = reads.rows(QUEUES_AND_TASKS)
    pairs = sorted((queue, task) for queue, task in rows if task is not None)
    queues = sorted({queue for queue, _ in rows})
    return Names(queues, pairs[:MOST_PAIRS], len(pairs) > MOST_PAIRS)


def names_among(known: Names, jobs: QuerySet[Any]) -> Names:
    """Return those of the names that one of the newest jobs among ``jobs`` has.

    Costs one statement for each pair.
    """
    sql, params = _is_among(jobs)
    statement = SEEN.format(most=LOOKED_AT_FOR_NAME, seen=sql)
    pairs = [pair for pair in known.pairs if reads.rows(statement, *pair, *params)]
    return Names(sorted({queue for queue, _ in pairs}), pairs, known.cut_short)


def _is_among(rows: QuerySet[Any]) -> tuple[str, list[Any]]:
    """Return the statement that finds the row with the id ``s.id`` among others, if it is there."""
    one = rows.order_by().filter(pk=RawSQL("s.id", ())).values("pk").query
    # A filter that no row can match must become a condition, too, and not an exception.
    sql, params = one.get_compiler(conf.get().database, elide_empty=False).as_sql()
    return sql, list(params)
