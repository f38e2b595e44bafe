"""The acts on jobs: one, those that were ticked, and everything that matches the filter."""

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
from relay_queue.admin.acts import audit, matching
from relay_queue.admin.acts.catalogue import JOB_ACTS, Act, Done, JobAct
from relay_queue.admin.acts.doing import BATCH, attempt
from relay_queue.admin.acts.pages import SHOWN_ON_CONFIRMATION, Acts
from relay_queue.admin.lists.searching import as_id
from relay_queue.exceptions import RelayError
from relay_queue.models import BulkAct, Job

UPPER: Final = "upper_id"
NONCE: Final = "nonce"
_ASKED_ALREADY: Final = gettext_lazy(
    "This had been asked for already. To ask again, choose it in the list once more."
)


class AskedAlready(RelayError):
    """A question was answered for the second time, by a second click say."""


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

    def tokens(self, request: HttpRequest) -> Sequence[tuple[str, Any]]:
        """Give each question a nonce; one that is asked again, for a fault in its form, keeps it."""
        return ((NONCE, request.POST.get(NONCE) or uuid.uuid4().hex),)

    def do(
        self, request: HttpRequest, act: Act, keys: Sequence[Any], given: dict[str, Any]
    ) -> Done:
        """Do it, and note it as a bulk act that is over: an answer that comes twice is done once.

        Raises `AskedAlready`, and what the store raises. Nothing is noted then.
        """
        if NONCE not in request.POST or not isinstance(act, JobAct):
            return super().do(request, act, keys, given)
        if request.POST.get("select_across") == "1":
            new = self._new_bulk(request, act, _upper_id(request), given)
        else:
            # No filter finds what was ticked by hand.
            new = self._new_bulk(request, act, 0, given)
            new = replace(new, listing="", filters=f"ticked={len(keys)}")
        with store.transaction() as tx:
            bulk_id = store.start_bulk(tx, replace(new, matched=len(keys)))
            if bulk_id is None:
                raise AskedAlready(_ASKED_ALREADY)
            done = super().do(request, act, keys, given)
            changed = len(done.changed)
            store.count_bulk(tx, bulk_id, changed=changed, skipped=len(keys) - changed)
            store.finish_bulk(tx, bulk_id)
        return done

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
        given = {} if form is None else form.cleaned_data
        new = self._new_bulk(request, act, upper_id, given)
        # Before the rows are looked for: the act may have got to some of them by now.
        if (earlier := matching.of_nonce(new.nonce)) is not None:
            return self._show_earlier(request, earlier)
        found = list(ids[: BATCH + 1])
        if len(found) <= BATCH:
            if found:
                self.do_and_tell(request, act, found, form)
            else:
                messages.warning(request, _("Nothing was done: no job like that is left."))
            return None
        new = replace(new, matched=matching.counted(ids))

        def begin() -> tuple[int, bool]:
            matching.require_repeatable(new, act, rows, self.admin_site)
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
        """Lead a question that is answered again, by a second click say, to what it has begun."""
        messages.info(request, _ASKED_ALREADY)
        return self._show_bulk(request, bulk_id)

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
        hidden += self.tokens(request)
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
        given: dict[str, Any],
    ) -> store.NewBulkAct:
        time_zone, language = matching.zone_and_language()
        return store.NewBulkAct(
            nonce=_nonce(request, act, given),
            act=act.name,
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
    """Write a bulk act down and enqueue the job that does it, in one transaction.

    Returns its id and True; or False and the id of the one that there is of its nonce.
    """
    # Not at the top: its task is bound to an alias of TASKS, which a project that only looks
    # need not have.
    from relay_queue.admin.acts.destination import destination

    destination()
    from relay_queue.admin.acts.bulk import run_bulk_act

    with store.transaction() as tx:
        bulk_id = store.start_bulk(tx, new)
        if bulk_id is None:
            return BulkAct.objects.using(conf.get().database).get(nonce=new.nonce).pk, False
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
    return bulk_id, True


def _nonce(request: HttpRequest, act: JobAct, given: dict[str, Any]) -> str:
    """Return what tells this question, with this answer, from every other.

    Nobody meets the act of somebody else by it, and an answer that was changed is another one.
    """
    asked = request.POST.get(NONCE) or uuid.uuid4().hex
    parts = (asked, request.user.pk, act.name, sorted(given.items()), request.get_full_path())
    return hashlib.sha256(repr(parts).encode(errors="replace")).hexdigest()[:32]


def _upper_id(request: HttpRequest) -> int:
    """Return the newest id that was there when the question was asked."""
    newest = matching.newest_id()
    asked = as_id(request.POST.get(UPPER, ""))
    return newest if asked is None else min(asked, newest)
