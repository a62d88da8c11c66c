"""Workers, Durable Objects, R2 and KV in CPython, for laptops and tests."""

from emulator.cluster import Cluster
from emulator.config import ObjectBinding, ServiceBinding, WorkerConfig, bundle
from emulator.errors import EmulatorError
from emulator.faults import Faults
from emulator.limits import Limits

__all__ = [
    "Cluster",
    "EmulatorError",
    "Faults",
    "Limits",
    "ObjectBinding",
    "ServiceBinding",
    "WorkerConfig",
    "bundle",
]
