"""What 1.0 did, pinned: these tests run inside a patched YOLOv9 checkout, see tests/support/patched_checkout.py.

The instruction set is pinned for this process and for all that it starts: sums of floats depend on it, and numbers are
compared to six digits. Integration tests that run in the same process have the same set.
"""

import os

os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
os.environ |= {"OPENBLAS_CORETYPE": "Haswell", "OMP_NUM_THREADS": "1"}

from patched_checkout import *  # noqa: F403
