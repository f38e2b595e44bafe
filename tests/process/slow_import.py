"""A module of tasks that takes its time to be imported."""

import time

from relay_queue.task import task

time.sleep(0.5)


@task
def nothing() -> None:
    pass
