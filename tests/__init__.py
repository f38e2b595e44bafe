"""Tests of Relay. They start real processes, send real signals and use real SQLite files."""
