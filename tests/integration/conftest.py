"""Integration tests run inside a patched YOLOv9 checkout: tests/support/patched_checkout.py."""

from patched_checkout import *  # noqa: F403
