"""What ``relay bench`` measures. A reader follows `figures` → `runner` → `workload` → a family.

The command starts a process for each family of figures. That process has new databases in a temporary
folder, or on the server that is measured, and workers started by the real ``runworker``.
"""
