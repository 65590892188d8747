"""What all tests begin with."""

from __future__ import annotations

import signal

# as a terminal has them: `make test &` or `nohup make test` hands down signals that are ignored, and so would kernels
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
