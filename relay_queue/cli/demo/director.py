"""Plays the scenes in the scratch project, sums up, and leaves nothing running."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Final

from django.core.management import call_command

from relay_queue import __version__, clock
from relay_queue.cli.base import INTERRUPTED
from relay_queue.cli.demo import summary
from relay_queue.cli.demo.scenes import SCENES
from relay_queue.cli.demo.screen import Screen
from relay_queue.cli.demo.stage import NotObserved, Stage
from relay_queue.cli.output import Output

MOST_SECONDS: Final = 110.0
"""When a demo that does not get on gives up: less than the two minutes that were promised."""

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(directory: Path, out: Output, *, color: bool) -> int:
    """Play everything; return 0, 1 if a promise was not kept, or 130 after an interruption."""
    began = time.monotonic()
    with Screen(out, color=color) as screen:
        stage = Stage(directory, screen, began + MOST_SECONDS)
        before = [signal.signal(number, stage.interrupt) for number in STOPPING]
        try:
            _play(stage)
        except NotObserved as missing:
            _complain(stage, missing)
            return 1
        except KeyboardInterrupt:
            screen.say()
            screen.say("Interrupted: stopping the workers.", "warning")
            return INTERRUPTED
        finally:
            stage.workers.close()
            for number, handler in zip(STOPPING, before, strict=True):
                signal.signal(number, handler)
    return summary.show(out, time.monotonic() - began)


def _play(stage: Stage) -> None:
    screen = stage.screen
    screen.say(f"Relay {__version__} at work, {clock.now():%Y-%m-%d %H:%M:%S} UTC", "title")
    screen.say("On a scratch database; the project's own is not touched.")
    screen.doing("making the scratch database")
    call_command("migrate", verbosity=0, interactive=False)
    for number, (title, play) in enumerate(SCENES, start=1):
        screen.scene(number, len(SCENES), title)
        play(stage)


def _complain(stage: Stage, missing: NotObserved) -> None:
    screen = stage.screen
    screen.say()
    screen.say(f"NOT OBSERVED: {missing}", "bad")
    screen.say("The end of the workers' log:")
    for line in stage.workers.last_words():
        screen.say(f"  {line}", "dim")
    screen.say("Run it again with --keep to look at the scratch database afterwards.")
