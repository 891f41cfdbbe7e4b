# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The messages between the two sides of the shared tier: plain data that can be pickled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_ascend_kvext.shared_tier.backend import SharedObject, UsedObjects


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The facts of one worker that decide what the bytes of its KV mean.

    Attributes:
        device: The device. It decides the order of bytes in pages that only kernels understand.
        weights: Digests that identify the weights of its models.
        refusal: Why the weights cannot be identified; empty if they can.
    """

    device: str
    weights: tuple[str, ...] = ()
    refusal: str = ""


class SharedJobs(NamedTuple):
    """The jobs that every worker begins with one step.

    Attributes:
        gets: Objects of the tier that the worker brings into host memory.
        puts: Objects in host memory that the worker puts into the tier.
        touches: Objects of the tier that were used.
    """

    gets: tuple[SharedObject, ...] = ()
    puts: tuple[SharedObject, ...] = ()
    touches: tuple[UsedObjects, ...] = ()

    @property
    def has_gets(self) -> bool:
        return bool(self.gets)


@dataclass(slots=True)
class SharedOutput:
    """What workers report besides the ends of their jobs.

    Attributes:
        got_bytes: The bytes that have come, summed over workers.
        failures: The number of gets, puts and touches that failed, by kind, summed over workers.
        has_new_weights: Whether some worker has loaded weights again since its last report.
        absent_objects: For each touch number, the indices of the touch's objects that some worker
            has not found.
    """

    got_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    has_new_weights: bool = False
    absent_objects: dict[int, set[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.got_bytes or self.failures or self.has_new_weights or self.absent_objects)

    def add(self, other: SharedOutput) -> None:
        """Join the report of another worker."""
        self.got_bytes += other.got_bytes
        self.failures += other.failures
        self.has_new_weights |= other.has_new_weights
        for number, absent in other.absent_objects.items():
            self.absent_objects.setdefault(number, set()).update(absent)
