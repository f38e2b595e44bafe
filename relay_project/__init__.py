"""The reference project: a small Django site that uses Relay the way any project would."""
