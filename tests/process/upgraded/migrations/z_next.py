"""What an upgrade may do while old workers go on: add a nullable column and an index."""

import pkgutil

from django.db import migrations, models

from tests.process.upgraded.migrations import RELEASED


class Migration(migrations.Migration):
    dependencies = [("relay_queue", max(found.name for found in pkgutil.iter_modules(RELEASED)))]

    operations = [
        migrations.AddField("job", "note", models.TextField(null=True)),
        migrations.AddField("lease", "note", models.TextField(null=True)),
        migrations.AddIndex("job", models.Index(fields=["note"], name="relay_job_note")),
    ]
