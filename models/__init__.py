"""Ours for YOLOv9's networks; in a checkout this folder has upstream's files, too, and its `__init__.py`."""
