"""What the tests of the acts share: people with permissions, jobs in every state, the audit."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.http import HttpResponse
from django.test import Client

from relay_queue import clock
from tests.store import actions

VIEWS = ("view_job", "view_queue", "view_worker", "view_lease")


def person(*codenames: str, name: str = "operator", enforce_csrf: bool = False) -> Client:
    """Return the browser of somebody who may look at everything, and do what is named."""
    user = User.objects.create_user(name, is_staff=True)
    permissions = Permission.objects.filter(
        content_type__app_label="relay_queue", codename__in=[*VIEWS, *codenames]
    )
    assert len(permissions) == len({*VIEWS, *codenames}), "a codename is not there"
    user.user_permissions.set(permissions)
    client = Client(enforce_csrf_checks=enforce_csrf)
    client.force_login(user)
    return client


def said(response: HttpResponse) -> str:
    """Return the messages that an answer leaves for the next page."""
    return " ".join(str(message) for message in get_messages(response.wsgi_request))  # type: ignore[attr-defined]


def entries() -> list[dict[str, Any]]:
    """Return the audit, oldest first."""
    return [
        {
            "user": entry.user.username,
            "model": entry.content_type.model if entry.content_type else "",
            "key": entry.object_id,
            "flag": entry.action_flag,
            "shown": entry.get_change_message(),
            "relay": json.loads(entry.change_message)[0]["relay"],
        }
        for entry in LogEntry.objects.order_by("pk")
    ]


def job_in(state: str, queue: str = "") -> int:
    """Bring one job into a state and return its id; each state has a queue of its own."""
    queue = queue or state
    if state == "scheduled":
        return actions.enqueue(queue=queue, run_after=clock.now() + timedelta(hours=1))
    job_id = actions.enqueue(queue=queue)
    if state == "ready":
        return job_id
    held = actions.claim_one(queue)
    if state == "retrying":
        actions.nack(held)
    elif state == "succeeded":
        actions.ack(held)
    elif state == "dead":
        actions.nack(held, fatal=True)
    elif state == "cancelled":
        actions.cancel(job_id)
    assert actions.state(job_id) == state
    return job_id
