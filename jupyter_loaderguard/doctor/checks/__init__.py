"""The checks, one per file, each with its code."""

from __future__ import annotations

from . import descriptor_limit, free_memory, kernel_threads, shm_size
from .aliases import AliasesCheck
from .copies import CopiesCheck
from .crowding import CrowdingCheck
from .cuda import CudaCheck
from .descriptors import DescriptorsCheck
from .failure import FailureCheck
from .handles import HandlesCheck
from .memory import MemoryCheck
from .serial import SerialCheck
from .shm_need import ShmNeedCheck
from .thread_pools import ThreadPoolsCheck

LOADER_CHECKS = (
    ThreadPoolsCheck,
    CudaCheck,
    HandlesCheck,
    CrowdingCheck,
    MemoryCheck,
    CopiesCheck,
    AliasesCheck,
    DescriptorsCheck,
    SerialCheck,
    ShmNeedCheck,
)
MACHINE_CHECKS = (shm_size, descriptor_limit, free_memory, kernel_threads)
CODES = tuple(
    sorted([check.CODE for check in MACHINE_CHECKS] + [check.code for check in (FailureCheck, *LOADER_CHECKS)])
)
