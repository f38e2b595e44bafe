"""Addresses of the reference project: the admin, and a way to its dashboard from the front page."""

from django.contrib import admin
from django.templatetags.static import static
from django.urls import path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:relay_queue_dashboard_changelist")),
    # Browsers ask for this one where no page names another: in front of an error or a file.
    path("favicon.ico", RedirectView.as_view(url=static("relay_project/relay.svg"))),
    path("admin/", admin.site.urls),
]
