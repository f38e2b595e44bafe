"""The verbs of ``manage.py relay``. ``base`` is the frame around them.

``jobs``, ``queues`` and ``workers`` have the verbs that operate on these; of the others each has a
module.
"""
