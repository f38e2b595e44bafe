"""What ``manage.py relay bench`` measures, and the scratch project in which it does.

The verb starts ``python -m relay_queue.bench`` once for each family of figures. That process has
the settings in `settings`, a new database in a temporary folder, and workers started by the real
``runworker``. Nothing here touches the database of the project that called the verb.
"""
