"""Triton reads this when it is first imported, by whichever test that is: without a GPU its kernels are interpreted."""

import os

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
