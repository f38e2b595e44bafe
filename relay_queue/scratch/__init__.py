"""What demo, bench and drill share: scratch folders, processes that end with their maker, journals.

A scratch project lives in a temporary folder. Nothing here knows the project's own database.
"""
