"""The project as a WSGI application, for gunicorn and its like."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "relay_project.settings")

application = get_wsgi_application()
