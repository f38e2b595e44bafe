"""The verbs of ``manage.py relay``. ``base`` is the frame around them.

``jobs``, ``queues`` and ``workers`` have the verbs that operate on these. Each other verb has a
module of its own, and ``output`` prints what a verb shows.
"""
