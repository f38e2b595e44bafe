"""The filters beside the lists. Each narrows the rows, and adds its choice to the criteria."""

from __future__ import annotations

from datetime import UTC, datetime, time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Choices, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from rangefilter.filters import DateTimeRangeFilter

from relay_queue.admin import sight
from relay_queue.query import ledger
from relay_queue.query.list_plans import Criteria, Span
from relay_queue.states import Outcome, State
from relay_queue.verdict import Verdict

if TYPE_CHECKING:
    from django.contrib.admin.views.main import ChangeList

MOST_CHOICES: Final = 100
"""Names that a filter offers; the search finds the jobs of other names."""


class Filter(admin.SimpleListFilter):
    """One choice of several: a value of ``column``, and of the ``criterion`` of the plans.

    Without a choice it adds no criterion. One that names no criterion fails at once.
    """

    template = "admin/relay_queue/filter.html"
    column = ""
    criterion = ""

    @property
    def known(self) -> set[str]:
        """The values that are offered; an address may have another."""
        return {str(value) for value, _label in self.lookup_choices}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the rows with the chosen value."""
        return queryset.filter(**{self.column: self.value()}) if self.value() else queryset

    def add_to(self, asked: Criteria) -> None:
        """Add the choice to the criteria."""
        setattr(asked, self.criterion, self.value() or "")


class ChoiceFilter(Filter):
    """Filters by one of all values of an enumeration."""

    enumeration: ClassVar[type[Choices]]

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        """Return all values."""
        return list(self.enumeration.choices)


class StateFilter(ChoiceFilter):
    """Filters by the state of the job."""

    title = _("state")
    parameter_name = "state__exact"
    column = criterion = "state"
    enumeration = State


class NameFilter(Filter):
    """Filters by a name; ``offered`` are the names that jobs have which the viewer may see."""

    offered = ""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the first names, up to ``MOST_CHOICES``."""
        names = getattr(sight.names(request, model_admin.admin_site), self.offered)
        return [(name, name) for name in names[:MOST_CHOICES]]

    def has_output(self) -> bool:
        """Whether there is anything to choose, or an address has chosen a name."""
        return bool(self.lookup_choices) or bool(self.value())


class QueueFilter(NameFilter):
    """Filters by queue."""

    title = _("queue")
    parameter_name = column = criterion = "queue"
    offered = "queues"


class JobQueueFilter(QueueFilter):
    """Filters leases by the queue of their job."""

    column = "job__queue"


class TaskFilter(NameFilter):
    """Filters by task. The choices are the tasks that have jobs."""

    title = _("task")
    parameter_name = column = criterion = "task"
    offered = "tasks"


class VerdictFilter(ChoiceFilter):
    """Filters by how often the function of the job ran."""

    title = _("verdict")
    parameter_name = criterion = "verdict"
    enumeration = Verdict

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the jobs with the chosen verdict."""
        if not self.value():
            return queryset
        if self.value() not in Verdict.values:
            return queryset.none()
        return ledger.filter_by_verdict(queryset, str(self.value()))


class OutcomeFilter(ChoiceFilter):
    """Filters leases by how they ended."""

    title = _("outcome")
    parameter_name = "outcome__exact"
    column = "outcome"
    enumeration = Outcome

    def add_to(self, asked: Criteria) -> None:
        """Add the outcome to the criteria."""
        asked.outcomes = [value] if (value := self.value()) else []


class PresenceFilter(Filter):
    """Filters by whether ``field`` has a value. Subclasses name the field and the two choices."""

    field = ""
    present: Any = _("Yes")
    absent: Any = _("No")

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the two choices."""
        return [("yes", self.present), ("no", self.absent)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the rows with, or those without, a value."""
        if self.value() not in {"yes", "no"}:
            return queryset
        return queryset.filter(**{f"{self.field}__isnull": self.value() == "no"})

    def add_to(self, asked: Criteria) -> None:
        """Add the field, and whether it has a value, to the criteria."""
        if self.value() in {"yes", "no"}:
            asked.presence[self.field] = self.value() == "yes"


class MomentField(forms.SplitDateTimeField):
    """A day and, if wanted, a time; without one the day's first or last moment."""

    def __init__(self, *, end: bool, **options: Any) -> None:
        """Make a field for the beginning, or for the ``end``, of a range."""
        self.end = end
        super().__init__(require_all_fields=False, required=False, **options)
        for part in self.fields:
            part.required = False  # `compress` reports what is missing

    def compress(self, data_list: Any) -> datetime | None:
        """Put day and time together; the end includes its whole minute."""
        if not data_list or data_list[0] in self.empty_values:
            if data_list and data_list[1] not in self.empty_values:
                raise ValidationError(_("Choose a day for this time."))
            return None
        day, at = data_list
        if at in self.empty_values:
            at = time.max if self.end else time.min
        elif self.end:
            at = at.replace(second=59, microsecond=999_999)
        moment = datetime.combine(day, at, timezone.get_current_timezone())
        try:
            return moment.astimezone(UTC).astimezone(moment.tzinfo)
        except OverflowError:
            raise ValidationError(_("No calendar reaches this day in every time zone.")) from None


class SpanFilter(DateTimeRangeFilter):  # type: ignore[misc]
    """A range of dates from django-admin-rangefilter, with the browser's own fields.

    These need neither script nor style in the page, so a strict content security policy holds.
    """

    template = "admin/relay_queue/span_filter.html"
    heading: ClassVar[Any] = ""
    asks: ClassVar[str] = ""
    only_states: ClassVar[tuple[str, ...]] = ()

    def choices(self, changelist: ChangeList) -> Any:
        """Yield the context of the template: the address of a reset, and parameters to keep."""
        mine, span = self.expected_parameters(), self.span
        kept = [
            (name, value)
            for name, values in changelist.filter_params.items()
            if name not in mine and name != "at"
            for value in (values if isinstance(values, list) else [values])
        ]
        reset = changelist.get_query_string({}, remove=mine)
        said = {"active": bool(span), "since": span.since, "until": span.until}
        yield {"kept": kept, "reset": reset, **said}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Keep the rows in the range; none if what was typed is no range."""
        if self.is_at_fault:
            # All rows would seem to be in the range, and an action would change all of them.
            return queryset.none()
        if not self.span:
            return queryset
        if self.only_states:
            queryset = queryset.filter(state__in=self.only_states)
        ends = {"gte": self.span.since, "lte": self.span.until}
        return queryset.filter(
            **{f"{self.field_path}__{end}": at for end, at in ends.items() if at is not None}
        )

    @property
    def is_at_fault(self) -> bool:
        """Whether a text that is no date was typed; the form reports it."""
        return bool(self.form.is_bound and not self.form.is_valid())

    @property
    def span(self) -> Span:
        """The range of the form; an open one if a typed text is no date."""
        if not self.form.is_bound or not self.form.is_valid():
            return Span()
        since, until = (self.form.cleaned_data[name] for name in self._ends())
        return Span(since, until)

    def add_to(self, asked: Criteria) -> None:
        """Add the range to the criteria; a range at fault finds no row."""
        if self.is_at_fault:
            asked.ids = []
            asked.others.add(self.field_path)
        elif self.span and self.asks:
            setattr(asked, self.asks, self.span)
        elif self.span:
            asked.others.add(self.field_path)

    def _get_default_title(self, request: HttpRequest, model_admin: Any, field_path: str) -> Any:
        return self.heading or self.title

    def _ends(self) -> tuple[str, str]:
        return self.lookup_kwarg_gte, self.lookup_kwarg_lte

    def _get_form_fields(self) -> dict[str, forms.Field]:
        since, until = self._ends()
        return {
            since: MomentField(end=False, label=_("From"), widget=self._widget(_("from"))),
            until: MomentField(end=True, label=_("Until"), widget=self._widget(_("until"))),
        }

    def _widget(self, which: Any) -> forms.SplitDateTimeWidget:
        return forms.SplitDateTimeWidget(
            date_format="%Y-%m-%d",
            time_format="%H:%M",
            date_attrs={"type": "date", "aria-label": f"{self.title}: {which}, {_('day')}"},
            time_attrs={"type": "time", "aria-label": f"{self.title}: {which}, {_('time')}"},
        )


class CreatedFilter(SpanFilter):
    """Filters jobs by when they were enqueued."""

    heading = _("Created")
    asks = "created"


class DueFilter(SpanFilter):
    """Filters jobs that wait for a time, scheduled or between two attempts, by that time."""

    heading = _("Due")
    asks = "due"
    only_states = (State.SCHEDULED, State.RETRYING)


class FinishedFilter(SpanFilter):
    """Filters jobs by when they ended."""

    heading = _("Finished")
    asks = "finished"
