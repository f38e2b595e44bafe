"""Admin sites by their names: where a bulk act, which has left its request, finds its list again."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.admin.sites import AdminSite, all_sites
from django.urls import NoReverseMatch, Resolver404, resolve, reverse


def named(name: str) -> AdminSite | None:
    """Return the admin site of a name; None if there is none, or if nobody can say which it is.

    Sites may share a name, such as Django's own and one of the project that is served in its place.
    The one that the addresses of the project lead to is then meant.
    """
    # A site is made where the addresses are, which a worker may not have imported yet.
    import_module(settings.ROOT_URLCONF)
    found = [site for site in all_sites if site.name == name]
    if len(found) == 1:
        return found[0]
    served = _served(name)
    return served if served in found else None


def _served(name: str) -> AdminSite | None:
    try:
        view = resolve(reverse(f"{name}:index")).func
    except (NoReverseMatch, Resolver404):
        return None
    return getattr(view, "admin_site", None)
