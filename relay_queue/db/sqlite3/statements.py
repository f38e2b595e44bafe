"""Which SQL statements are known to leave the database file alone.

In doubt a statement counts as a write. A needless gate costs microseconds; a missing one costs
another process its turn.
"""

from __future__ import annotations

import re
from functools import lru_cache

# What may stand before the first word of a statement.
_LEADING = re.compile(r"(?:\s+|;|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_WRITES = re.compile(r"\b(?:INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)
_PRAGMA = re.compile(
    r"PRAGMA\s+(?:[\"\[`]?\w+[\"\]`]?\s*\.\s*)?(?P<name>\w+)\s*(?P<value>[=(])?", re.IGNORECASE
)

# fmt: off
# These read, or set something of this connection only, with or without a value.
_HARMLESS_PRAGMAS = frozenset({
    "analysis_limit", "automatic_index", "busy_timeout", "cache_size", "cache_spill",
    "case_sensitive_like", "cell_size_check", "checkpoint_fullfsync", "collation_list",
    "compile_options", "data_version", "database_list", "defer_foreign_keys",
    "foreign_key_check", "foreign_key_list", "foreign_keys", "fullfsync", "function_list",
    "hard_heap_limit", "ignore_check_constraints", "index_info", "index_list", "index_xinfo",
    "integrity_check", "journal_size_limit", "legacy_alter_table", "mmap_size", "module_list",
    "pragma_list", "query_only", "quick_check", "read_uncommitted", "recursive_triggers",
    "reverse_unordered_selects", "shrink_memory", "soft_heap_limit", "synchronous",
    "table_info", "table_list", "table_xinfo", "temp_store", "threads", "trusted_schema",
    "wal_autocheckpoint",
})

# These read the database without a value and write it with one.
_READING_PRAGMAS = frozenset({
    "application_id", "auto_vacuum", "encoding", "freelist_count", "journal_mode",
    "locking_mode", "max_page_count", "page_count", "page_size", "schema_version",
    "secure_delete", "user_version",
})
# fmt: on


def is_read_only(sql: str) -> bool:
    """Say whether ``sql``, one statement, is known not to write the database file."""
    # The ORM writes its queries like this; do not fill the cache with them.
    return sql.startswith("SELECT ") or _is_read_only(sql)


@lru_cache(maxsize=512)
def _is_read_only(sql: str) -> bool:
    start = _LEADING.match(sql)
    statement = sql[start.end() :] if start else sql
    word = _WORD.match(statement)
    match word.group().upper() if word else "":
        case "SELECT" | "VALUES" | "EXPLAIN":
            return True
        case "WITH":
            # Looks inside strings and names too, which can only err on the safe side.
            return _WRITES.search(statement) is None
        case "PRAGMA":
            return _is_harmless_pragma(statement)
    return False


def _is_harmless_pragma(statement: str) -> bool:
    found = _PRAGMA.match(statement)
    if found is None:
        return False
    name = found["name"].lower()
    return name in _HARMLESS_PRAGMAS or (name in _READING_PRAGMAS and found["value"] is None)
