"""Every public behaviour of Django's task framework, as it must be with Relay behind it.

The suite runs on whatever framework is installed: Django's own of 6.0 and 6.1, or the backport.
"""
