"""The actions on jobs: on one, on ticked ones, and on everything that matches a filter."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from django.contrib import messages
from django.db.models import QuerySet
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from relay_queue import conf, store
from relay_queue.admin.actions import matching
from relay_queue.admin.actions.catalogue import JOB_ACTIONS, Action, Done, JobAction
from relay_queue.admin.actions.pages import SHOWN_ON_CONFIRMATION, Actions
from relay_queue.admin.actions.perform import attempt
from relay_queue.admin.lists.searching import as_id
from relay_queue.exceptions import RelayError
from relay_queue.models import BulkAct, Job
from relay_queue.store.operate import BATCH

UPPER: Final = "upper_id"
NONCE: Final = "nonce"
_ASKED_ALREADY: Final = gettext_lazy(
    "This had been asked for already. To ask again, choose it in the list once more."
)


class AskedAlready(RelayError):
    """The answer to a question came a second time, by a second click for example."""


class JobActions(Actions):
    """Adds the actions on jobs to a list of jobs and to the page of a job."""

    row_actions: ClassVar[tuple[Action, ...]] = JOB_ACTIONS
    actions_model = Job

    def perform_on_selection(
        self, request: HttpRequest, action: Action, listed: QuerySet[Any]
    ) -> HttpResponse | None:
        """Perform an action on the rows that were ticked, or on everything that matches."""
        if request.POST.get("select_across") == "1" and isinstance(action, JobAction):
            return self.perform_on_matching(request, action, listed)
        return super().perform_on_selection(request, action, listed)

    def tokens(self, request: HttpRequest) -> Sequence[tuple[str, Any]]:
        """Give each question a nonce. A question repeated for a fault in its form keeps it."""
        return ((NONCE, request.POST.get(NONCE) or uuid.uuid4().hex),)

    def perform(
        self, request: HttpRequest, action: Action, keys: Sequence[Any], given: dict[str, Any]
    ) -> Done:
        """Perform it, and record it as a bulk act that has ended: a second answer does nothing.

        One transaction deletes a bounded number of leases; what it leaves is done by the next ones.
        Raises `AskedAlready`, and what the store raises. What was committed by then is recorded.
        """
        bulk_id, done = None, Done(left=keys)
        while True:
            with store.transaction() as tx:
                if bulk_id is None and NONCE in request.POST and isinstance(action, JobAction):
                    bulk_id = self._begin(request, tx, action, keys, given)
                part = super().perform(request, action, done.left, given)
                if bulk_id is not None:
                    changed = len(part.changed)
                    skipped = len(done.left) - changed - len(part.left)
                    store.count_bulk(tx, bulk_id, changed=changed, skipped=skipped)
            done = Done(done.changed | part.changed, done.skipped | part.skipped, part.left)
            if not done.left:
                return done

    def _begin(
        self,
        request: HttpRequest,
        tx: store.Transaction,
        action: Action,
        keys: Sequence[Any],
        given: dict[str, Any],
    ) -> int:
        """Record a bulk act. It has ended for a second answer, though this one is yet to work."""
        if request.POST.get("select_across") == "1":
            new = self._new_bulk(request, action, _upper_id(request), given)
        else:
            # No filter finds rows that were ticked by hand.
            new = self._new_bulk(request, action, 0, given)
            new = replace(new, listing="", filters=f"ticked={len(keys)}")
        bulk_id = store.start_bulk(tx, replace(new, matched=len(keys)))
        if bulk_id is None:
            raise AskedAlready(_ASKED_ALREADY)
        store.finish_bulk(tx, bulk_id)
        return bulk_id

    def perform_on_matching(
        self, request: HttpRequest, action: JobAction, rows: QuerySet[Any]
    ) -> HttpResponse | None:
        """Ask with the number of jobs; then perform it at once, or by a job if there are many."""
        upper_id = _upper_id(request)
        ids = matching.targets(rows, action, upper_id)
        form = self.asked(request, action)
        # Always asked: the operator has not seen all of these rows.
        if UPPER not in request.POST or (form is not None and not form.is_valid()):
            return self._confirm_matching(request, action, form, rows, upper_id)
        given = {} if form is None else form.cleaned_data
        new = self._new_bulk(request, action, upper_id, given)
        # Before the rows are read: the first answer may have changed some of them by now.
        if (earlier := matching.of_nonce(new.nonce)) is not None:
            return self._show_earlier(request, earlier)
        found = list(ids[: BATCH + 1])
        if len(found) <= BATCH:
            if found:
                self.perform_and_report(request, action, found, form)
            else:
                messages.warning(request, _("Nothing was done: no job like that is left."))
            return None
        new = replace(new, matched=matching.counted(ids))

        def begin() -> tuple[int, bool]:
            matching.require_repeatable(new, action, rows, self.admin_site)
            return start(new, request.user.pk)

        begun = attempt(request, begin)
        if begun is None:
            return None
        bulk_id, is_new = begun
        return self._show_bulk(request, bulk_id) if is_new else self._show_earlier(request, bulk_id)

    def _show_bulk(self, request: HttpRequest, bulk_id: int) -> HttpResponse:
        if self.admin_site.is_registered(BulkAct):
            name = f"{self.admin_site.name}:relay_queue_bulkact_change"
            return redirect(reverse(name, args=[bulk_id]))
        messages.info(request, _("A worker does it: bulk act %(id)s.") % {"id": bulk_id})
        return redirect(request.get_full_path())

    def _show_earlier(self, request: HttpRequest, bulk_id: int) -> HttpResponse:
        """Lead a second answer to the bulk act that the first one began."""
        messages.info(request, _ASKED_ALREADY)
        return self._show_bulk(request, bulk_id)

    def _confirm_matching(
        self,
        request: HttpRequest,
        action: JobAction,
        form: Form | None,
        rows: QuerySet[Any],
        upper_id: int,
    ) -> HttpResponse:
        ids = matching.targets(rows, action, upper_id)
        number = matching.count(ids)
        hidden = [("action", action.name), ("select_across", "1"), (UPPER, upper_id)]
        hidden += self.tokens(request)
        hidden += [("_selected_action", "0")]  # without one Django sees no selection
        first = list(ids[:SHOWN_ON_CONFIRMATION])
        shown = self.get_queryset(request).filter(pk__in=first).order_by("pk")
        return self.confirm(
            request,
            action,
            form,
            rows=shown.defer(*action.heavy),
            count=min(number, matching.MOST_COUNTED),
            hidden=hidden,
            matching=True,
            beyond=number > matching.MOST_COUNTED,
            background=number > BATCH,
            batch=BATCH,
            states=[state.label for state in action.states],
        )

    def _new_bulk(
        self,
        request: HttpRequest,
        action: Action,
        upper_id: int,
        given: dict[str, Any],
    ) -> store.NewBulkAct:
        time_zone, language = matching.zone_and_language()
        return store.NewBulkAct(
            nonce=_nonce(request, action, given),
            act=action.name,
            priority=given.get("priority"),
            listing=self.opts.label_lower,
            filters=matching.filters_of(request),
            time_zone=time_zone,
            language=language,
            upper_id=upper_id,
            matched=None,
            user_id=str(request.user.pk),
            username=request.user.get_username(),
            site=self.admin_site.name,
        )


def start(new: store.NewBulkAct, user_id: Any) -> tuple[int, bool]:
    """Insert a bulk act and enqueue the job that performs it, in one transaction.

    Returns its id and True; or the id of an earlier one of the same nonce, and False.
    """
    # Not at the top: the task is bound to an alias of TASKS, and a project whose console only
    # reads need not have one.
    from relay_queue.admin.actions.bulk import destination, run_bulk_act

    destination()
    with store.transaction() as tx:
        bulk_id = store.start_bulk(tx, new)
        if bulk_id is None:
            return BulkAct.objects.using(conf.get().database).get(nonce=new.nonce).pk, False
        result = run_bulk_act.enqueue(bulk_id)
        if result.id:  # not known yet if the alias enqueues on another database's commit
            store.give_bulk_to_job(tx, bulk_id, int(result.id))
        details = {"filters": new.filters, "list": new.listing, "upper_id": new.upper_id}
        matching.record_progress(user_id, BulkAct(pk=bulk_id, act=new.act), "begun", details)
    return bulk_id, True


def _nonce(request: HttpRequest, action: Action, given: dict[str, Any]) -> str:
    """Return what identifies a question with its answer.

    Another person or another answer gets another nonce.
    """
    asked = request.POST.get(NONCE) or uuid.uuid4().hex
    parts = (asked, request.user.pk, action.name, sorted(given.items()), request.get_full_path())
    return hashlib.sha256(repr(parts).encode(errors="replace")).hexdigest()[:32]


def _upper_id(request: HttpRequest) -> int:
    """Return the newest id of the moment of the question."""
    newest = matching.newest_id()
    asked = as_id(request.POST.get(UPPER, ""))
    return newest if asked is None else min(asked, newest)
