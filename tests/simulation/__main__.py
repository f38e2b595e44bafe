"""Play seeds from the command line: ``python -m tests.simulation --seeds 100000 --first 0``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import django


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    made.add_argument("--seeds", type=int, default=2000, help="how many (default: 2000)")
    made.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    made.add_argument("--seed", type=int, help="play this one only, and tell its whole story")
    made.add_argument("--plants", action="store_true", help="plant bugs, and see them caught")
    return made


def main(arguments: list[str]) -> int:
    """Play the seeds that were asked for; return 1 if one of them failed."""
    options = parser().parse_args(arguments)
    # The scratch database is in memory where it can be: it must not stay there.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    if options.seed is not None:
        return tell(options.seed)
    if options.plants:
        return catch(options.seeds)
    return search(options.first, options.seeds)


def tell(seed: int) -> int:
    """Play one seed and print the story of each job, the hash of its history and what is wrong."""
    from tests.history.checker import timeline
    from tests.simulation.play import play
    from tests.simulation.scratch import scratch

    with scratch() as database:
        played = play(seed, database)
    for job_id, label in played.seen.added.items():
        print(f"job {job_id} ({label}):")
        print(*timeline(played.seen, job_id), sep="\n")
    print(f"history {played.digest}")
    print(played.report())
    return int(bool(played.violations))


def catch(most: int) -> int:
    """Plant each bug and print the first seed that catches it."""
    from tests.simulation.plants import PLANTS, first_catch
    from tests.simulation.scratch import scratch

    escaped = 0
    with scratch() as database:
        for name, plant in PLANTS.items():
            caught = first_catch(plant, database, most)
            escaped += caught is None
            told = f"{caught.violation.rule}: {caught.violation.message}" if caught else "ESCAPED"
            seeds = f"{caught.seed + 1} seeds" if caught else f"{most} seeds"
            print(f"{name:32} {seeds:>10}  {told}", flush=True)
    return int(escaped > 0)


def search(first: int, count: int) -> int:
    """Play many seeds, and print those that fail."""
    from tests.simulation.play import play
    from tests.simulation.scratch import scratch

    failed, began = 0, time.monotonic()
    with scratch() as database:
        for done, seed in enumerate(range(first, first + count), 1):
            played = play(seed, database)
            if played.violations:
                failed += 1
                print(played.report(), flush=True)
            if done % 1000 == 0:
                print(
                    f"{done:,} seeds, {time.monotonic() - began:.0f} s, {failed} failed", flush=True
                )
    print(f"{count:,} seeds from {first}: {failed} failed, {time.monotonic() - began:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
