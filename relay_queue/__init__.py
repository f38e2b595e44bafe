"""Relay: durable background jobs for Django with no broker to run."""

__version__ = "0.1.0"
