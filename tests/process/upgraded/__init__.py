"""The next release, as far as a test can know it: one more migration, and settings that see it."""
