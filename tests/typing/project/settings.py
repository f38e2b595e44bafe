"""The least settings with which the plugin of django-stubs is content."""

import django

from relay_queue.backoff import Backoff

SECRET_KEY = "only-for-types"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "relay_queue", "shop"]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
DATABASES = {"default": {"ENGINE": "relay_queue.db.sqlite3", "NAME": ":memory:"}}
TASKS = {
    "default": {
        "BACKEND": "relay_queue.backend.RelayBackend",
        "QUEUES": [],
        "OPTIONS": {
            "max_attempts": 5,
            "backoff": Backoff(base_seconds=1),
            "timeout_seconds": 60,
            "lease_seconds": 60,
            "max_payload_bytes": 65_536,
            "enqueue_on_commit": True,
        },
    },
    "bulk": {"BACKEND": "relay_queue.backend.RelayBackend"},
}
