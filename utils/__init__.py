"""The library; in a checkout this folder has upstream's files, too, and its `__init__.py`."""
