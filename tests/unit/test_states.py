"""The life of a job, as section "States" of the design promises it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_queue import states
from relay_queue.states import Outcome, State

PROMISED = {
    (State.SCHEDULED, State.READY): "due",
    (State.SCHEDULED, State.CANCELLED): "cancel",
    (State.READY, State.RUNNING): "claim",
    (State.READY, State.DEAD): "altered payload found at claim",
    (State.READY, State.CANCELLED): "cancel",
    (State.RUNNING, State.SUCCEEDED): "ack",
    (State.RUNNING, State.RETRYING): "nack, attempts left",
    (State.RUNNING, State.DEAD): "fatal, exhausted, lost with none left",
    (State.RUNNING, State.CANCELLED): "cancel",
    (State.RUNNING, State.READY): "release, or the first loss in a row",
    (State.RUNNING, State.SCHEDULED): "snooze",
    (State.RETRYING, State.READY): "due",
    (State.RETRYING, State.CANCELLED): "cancel",
    (State.DEAD, State.READY): "requeue",
    (State.CANCELLED, State.READY): "requeue",
}

all_states = st.sampled_from(list(State))


@pytest.mark.parametrize("from_state", State)
@pytest.mark.parametrize("to_state", State)
def test_exactly_the_promised_transitions_are_legal(from_state: State, to_state: State) -> None:
    assert states.can(from_state, to_state) == ((from_state, to_state) in PROMISED)


def test_the_table_is_closed() -> None:
    assert states.TRANSITIONS.keys() == set(State)
    assert set().union(*states.TRANSITIONS.values()) <= set(State)


def test_every_state_is_reached_from_a_fresh_job_and_can_reach_an_end() -> None:
    def reachable(start: set[State]) -> set[State]:
        found = set(start)
        while more := set().union(*(states.TRANSITIONS[s] for s in found)) - found:
            found |= more
        return found

    assert reachable({State.SCHEDULED}) == set(State)
    for state in State:
        assert reachable({state}) & states.TERMINAL


def test_terminal_states_are_exactly_succeeded_dead_and_cancelled() -> None:
    assert {State.SUCCEEDED, State.DEAD, State.CANCELLED} == states.TERMINAL
    assert set(State) - states.TERMINAL == states.UNFINISHED


def test_a_terminal_state_leads_nowhere_but_back_to_ready() -> None:
    for state in states.TERMINAL:
        assert states.TRANSITIONS[state] <= {State.READY}


def test_succeeded_never_changes() -> None:
    assert not states.TRANSITIONS[State.SUCCEEDED]


def test_every_unfinished_job_can_be_cancelled_and_no_other() -> None:
    assert states.CANCELLABLE == states.UNFINISHED


def test_only_dead_and_cancelled_jobs_can_be_requeued() -> None:
    assert {State.DEAD, State.CANCELLED} == states.REQUEUEABLE
    assert {s for s in states.TERMINAL if states.can(s, State.READY)} == states.REQUEUEABLE


def test_only_a_claim_leads_to_running() -> None:
    assert [s for s in State if states.can(s, State.RUNNING)] == [State.READY]


def test_only_a_running_job_succeeds() -> None:
    assert [s for s in State if states.can(s, State.SUCCEEDED)] == [State.RUNNING]


@given(st.text(), st.text() | all_states)
def test_unknown_states_may_go_nowhere(unknown: str, other: str) -> None:
    if unknown not in State.values:
        assert not states.can(unknown, other)
        assert not states.can(other, unknown)


@given(all_states, all_states)
def test_states_may_be_given_as_the_texts_that_the_table_holds(one: State, other: State) -> None:
    assert states.can(one.value, other.value) == states.can(one, other)


def test_only_released_unrun_and_snoozed_leases_give_their_attempt_back() -> None:
    assert {Outcome.RELEASED, Outcome.UNRUN, Outcome.SNOOZED} == states.UNCHARGED


def test_an_effect_is_known_only_when_the_function_itself_ended_the_attempt() -> None:
    by_function = {Outcome.ACKED, Outcome.FAILED, Outcome.FATAL, Outcome.SNOOZED}
    assert by_function == states.ANSWERED


def test_last_outcomes_are_given_for_the_terminal_states_alone() -> None:
    assert states.LAST_OUTCOMES.keys() == states.TERMINAL


def test_a_job_succeeded_only_by_an_ack() -> None:
    assert states.LAST_OUTCOMES[State.SUCCEEDED] == {Outcome.ACKED}
    for state in (State.DEAD, State.CANCELLED):
        assert Outcome.ACKED not in states.LAST_OUTCOMES[state]


@pytest.mark.parametrize("state", [State.DEAD, State.CANCELLED])
def test_a_job_may_end_dead_or_cancelled_after_any_other_outcome_or_without_a_lease(
    state: State,
) -> None:
    assert states.LAST_OUTCOMES[state] == {None, *Outcome} - {Outcome.ACKED}


def test_names_of_states_and_outcomes_fit_their_columns() -> None:
    from relay_queue.models import Job, Lease

    for choices, column in (
        (State, Job._meta.get_field("state")),
        (Outcome, Lease._meta.get_field("outcome")),
    ):
        assert max(map(len, choices.values)) <= column.max_length
