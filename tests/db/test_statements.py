"""What counts as harmless: only what surely leaves the file alone."""

from __future__ import annotations

import pytest

from relay_queue.db.sqlite3.cursor import is_read_only


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "select 1",
        "  \n\tSelect * from t",
        "-- a comment\nSELECT 1",
        "/* INSERT */ SELECT 1",
        "/* one */ -- two\n  /* three */select 1",
        ";SELECT 1",
        "VALUES (1), (2)",
        "EXPLAIN DELETE FROM t",
        "EXPLAIN QUERY PLAN UPDATE t SET n = 1",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "WITH RECURSIVE a(n) AS (VALUES(1) UNION ALL SELECT n+1 FROM a) SELECT n FROM a LIMIT 3",
        "PRAGMA foreign_keys = OFF",
        "PRAGMA foreign_keys",
        "PRAGMA table_info(t)",
        'pragma "main".table_xinfo(t)',
        "PRAGMA main.index_list('t')",
        "PRAGMA foreign_key_check",
        "PRAGMA integrity_check(10)",
        "PRAGMA journal_mode",
        "PRAGMA user_version",
    ],
)
def test_statements_that_surely_read_need_no_gate(sql: str) -> None:
    assert is_read_only(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "INSERT INTO t VALUES (1)",
        "insert into t values (1) returning n",
        "REPLACE INTO t VALUES (1)",
        "/* SELECT */ DELETE FROM t",
        "-- SELECT 1\nUPDATE t SET n = 1",
        "WITH a AS (SELECT 1) INSERT INTO t SELECT * FROM a",
        "with a as (select 1) delete from t",
        "WITH a AS (SELECT 1)\nUPDATE t SET n = 1",
        "WITH a AS (SELECT 1) REPLACE INTO t SELECT * FROM a",
        "CREATE TABLE t (n)",
        "DROP TABLE t",
        "ALTER TABLE t ADD COLUMN m",
        "VACUUM",
        "VACUUM INTO 'copy.db'",
        "REINDEX",
        "ANALYZE",
        "BEGIN",
        "SAVEPOINT a",
        "ATTACH 'other.db' AS other",
        "PRAGMA wal_checkpoint(TRUNCATE)",
        "PRAGMA wal_checkpoint",
        "PRAGMA incremental_vacuum",
        "PRAGMA optimize",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA main.journal_mode(WAL)",
        "PRAGMA user_version = 3",
        "PRAGMA something_from_the_future",
        "SELECTION",
    ],
)
def test_everything_else_passes_the_gate(sql: str) -> None:
    assert not is_read_only(sql)
