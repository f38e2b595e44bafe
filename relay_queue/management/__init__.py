"""Management commands: arguments only, the work is done below."""
