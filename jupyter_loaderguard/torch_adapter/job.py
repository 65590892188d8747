"""The job of torch.distributed that this process is in; nothing is imported for it."""

from __future__ import annotations

import os
import sys
from typing import Any


def distributed_rank() -> int | None:
    """Return the number of this process in torch.distributed, if that is in use."""
    module = sys.modules.get("torch.distributed")
    try:
        return int(module.get_rank()) if module is not None and module.is_initialized() else None
    except (AttributeError, ValueError, RuntimeError):  # built without it, or just being set up or ended
        return None


def job() -> str:
    """Return what tells the job of this process from others; empty if it has no other ranks."""
    module: Any = sys.modules.get("torch.distributed")
    try:
        size = module.get_world_size() if module is not None and module.is_initialized() else 1
        return f"{size} ranks at {_meeting_point(module)}" if size > 1 else ""
    except (AttributeError, ValueError, RuntimeError, KeyError):  # as above
        return ""


def _meeting_point(module: Any) -> str:
    """Return where its ranks found one another."""
    store = module.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", os.environ.get("MASTER_ADDR", "")))
