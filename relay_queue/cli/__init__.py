"""The verbs of ``manage.py relay``, one module each; ``base`` is the frame around them."""
