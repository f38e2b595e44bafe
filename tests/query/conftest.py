"""The reading wing is tested on the engines of the store's contract suite."""

from tests.store.conftest import engine, transactional_db, wall

__all__ = ["engine", "transactional_db", "wall"]
