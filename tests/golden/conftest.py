"""What 1.0 did, pinned: these tests run inside a patched YOLOv9 checkout, see tests/support/patched_checkout.py.

No instruction set is chosen here: bounds hold for any (tests/support/golden_bounds.py), and the environment can ask
for one: `ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default ./scripts/test.sh --golden`.
"""

from patched_checkout import *  # noqa: F403
