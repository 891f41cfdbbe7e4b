# SPDX-License-Identifier: Apache-2.0
"""Why a checkpoint is kept. How useful it turns out, ``csrc/retention/use_rates.h`` knows."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Origin(enum.IntEnum):
    """What suggested a boundary. The values are those of ``csrc/retention/use_rates.h``."""

    GRID = 0
    """A multiple of the retention interval."""

    PROMPT = 1
    """The replay boundary: where the same prompt resumes."""

    LATEST = 2
    """The last boundary a request computed: where its next turn resumes."""

    LADDER = 3
    """Some distance before the end of a prompt."""

    CHUNK = 4
    """Where a prefill step ended, and left a state."""

    JUNCTION = 5
    """Where full attention still hit and the sparse groups did not."""

    WANTED = 6
    """A boundary that an earlier request had computed and that is gone."""

    HINT = 7
    """Named by the request."""

    OVERLAP = 8
    """Complete because of blocks that are kept for other boundaries."""

    USE = 9
    """Resumed from before, whatever it was kept for at first."""


STEPS_END_AT = frozenset({Origin.JUNCTION, Origin.WANTED, Origin.HINT})
"""Worth a prefill step of their own where a state exists only at the end of a step."""


class Reason(NamedTuple):
    """What checkpoints are judged by until they are of use.

    ``step`` is the rung of a ladder, or 1 for a LATEST boundary that is the replay boundary, too.
    """

    origin: Origin
    step: int = 0
