"""The acts on jobs: one, those that were ticked, and everything that matches the filter."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db.models import QuerySet
from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from relay_queue import store
from relay_queue.admin.acts import audit, matching
from relay_queue.admin.acts.catalogue import JOB_ACTS, Act, JobAct
from relay_queue.admin.acts.doing import BATCH, attempt
from relay_queue.admin.acts.pages import SHOWN_ON_CONFIRMATION, Acts
from relay_queue.admin.lists.searching import as_id
from relay_queue.models import BulkAct, Job

UPPER = "upper_id"


class JobActs(Acts):
    """Adds the acts on jobs to a list of jobs and to the page of a job."""

    acts: ClassVar[tuple[Act, ...]] = JOB_ACTS
    acts_model = Job

    def act_on_selection(
        self, request: HttpRequest, act: Act, listed: QuerySet[Any]
    ) -> HttpResponse | None:
        """Do an act to the rows that were ticked, or to everything that matches."""
        if request.POST.get("select_across") == "1" and isinstance(act, JobAct):
            return self.act_on_matching(request, act, listed)
        return super().act_on_selection(request, act, listed)

    def act_on_matching(
        self, request: HttpRequest, act: JobAct, rows: QuerySet[Any]
    ) -> HttpResponse | None:
        """Ask with the number of jobs; then do it at once, or in the background if they are many."""
        upper_id = _upper_id(request)
        ids = matching.targets(rows, act, upper_id)
        form = self.asked(request, act)
        # Always asked: nobody has seen all these rows.
        if UPPER not in request.POST or (form is not None and not form.is_valid()):
            return self._confirm_matching(request, act, form, rows, upper_id)
        found = list(ids[: BATCH + 1])
        if len(found) <= BATCH:
            self.do_and_tell(request, act, found, form)
            return None
        given = {} if form is None else form.cleaned_data
        new = self._new_bulk(request, act, upper_id, matching.count(ids), given)
        bulk_id = attempt(request, lambda: start(new, request.user.pk))
        if bulk_id is None:
            return None
        return redirect(
            reverse(f"{self.admin_site.name}:relay_queue_bulkact_change", args=[bulk_id])
        )

    def _confirm_matching(
        self,
        request: HttpRequest,
        act: JobAct,
        form: Form | None,
        rows: QuerySet[Any],
        upper_id: int,
    ) -> HttpResponse:
        ids = matching.targets(rows, act, upper_id)
        number = matching.count(ids)
        hidden = [("action", act.name), ("select_across", "1"), (UPPER, upper_id)]
        hidden += [("_selected_action", "0")]  # or Django takes it for no selection
        first = list(ids[:SHOWN_ON_CONFIRMATION])
        shown = self.get_queryset(request).filter(pk__in=first).order_by("pk")
        return self.confirm(
            request,
            act,
            form,
            rows=shown.defer(*act.heavy),
            count=min(number, matching.MOST_COUNTED),
            hidden=hidden,
            matching=True,
            beyond=number > matching.MOST_COUNTED,
            background=number > BATCH,
            batch=BATCH,
            states=[state.label for state in act.states],
        )

    def _new_bulk(
        self,
        request: HttpRequest,
        act: JobAct,
        upper_id: int,
        number: int,
        given: dict[str, Any],
    ) -> store.NewBulkAct:
        time_zone, language = matching.zone_and_language()
        return store.NewBulkAct(
            act=act.name,
            priority=given.get("priority"),
            listing=self.opts.label_lower,
            filters=matching.filters_of(request),
            time_zone=time_zone,
            language=language,
            upper_id=upper_id,
            matched=number if number <= matching.MOST_COUNTED else None,
            user_id=str(request.user.pk),
            username=request.user.get_username(),
        )


def start(new: store.NewBulkAct, user_id: Any) -> int:
    """Write a bulk act down and enqueue the job that does it, in one transaction; return its id."""
    # Not at the top: its task is bound to an alias of TASKS, which a project that only looks
    # need not have.
    from relay_queue.admin.acts.destination import destination

    destination()
    from relay_queue.admin.acts.bulk import run_bulk_act

    with store.transaction() as tx:
        bulk_id = store.start_bulk(tx, new)
        result = run_bulk_act.enqueue(bulk_id)
        if result.id:  # not known yet if the alias enqueues on another database's commit
            store.give_bulk_to_job(tx, bulk_id, int(result.id))
        details = {"filters": new.filters, "list": new.listing, "upper_id": new.upper_id}
        audit.record(
            user_id,
            BulkAct,
            [(bulk_id, str(BulkAct(pk=bulk_id, act=new.act)), "progress to begun")],
            new.act,
            details,
        )
    return bulk_id


def _upper_id(request: HttpRequest) -> int:
    """Return the newest id that was there when the question was asked."""
    newest = matching.newest_id()
    asked = as_id(request.POST.get(UPPER, ""))
    return newest if asked is None else min(asked, newest)
