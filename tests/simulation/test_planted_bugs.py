"""The checker can fail: each bug that is planted in the store is caught, and soon."""

from __future__ import annotations

import pytest

from tests.simulation.plants import PLANTS, first_catch
from tests.simulation.play import play
from tests.simulation.scratch import Scratch

MOST_SEEDS = 100
"""Far fewer than every run of the suite plays."""


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(database: Scratch, name: str) -> None:
    caught = first_catch(PLANTS[name], database, MOST_SEEDS)
    assert caught is not None, f"{name} was not seen in {MOST_SEEDS} seeds"
    # The bug it was, and nothing else: without it the same seed is fine.
    sound = play(caught.seed, database)
    assert not sound.violations, sound.report()


def test_a_failure_names_the_seed_and_tells_the_story_of_the_job(database: Scratch) -> None:
    plant = PLANTS["no_ended_check_in_the_guard"]
    caught = first_catch(plant, database, MOST_SEEDS)
    assert caught is not None
    with plant.planted():
        played = play(caught.seed, database)
    told = played.report()
    assert f"python -m tests.simulation --seed {caught.seed}" in told
    assert f"timeline of job {caught.violation.job}:" in told
    story = told.partition("timeline of")[2]
    assert "enqueue invoke" in story
    assert "committed: lease" in story
    assert "settle told" in story
