"""The verbs of ``manage.py relay``. ``base`` is the frame around them.

``operate`` has the verbs on jobs, queues and workers, ``upkeep`` those that keep a database in
order, and ``lab`` those of the laboratory. Each other verb has a module of its own, and ``output``
prints what a verb shows.
"""
