# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Why a checkpoint is kept. ``csrc/retention/use_rates.h`` learns how useful it turns out."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Origin(enum.IntEnum):
    """The source of a boundary. The values are the same as in ``csrc/retention/use_rates.h``."""

    GRID = 0
    """A multiple of the retention interval."""

    PROMPT = 1
    """The replay boundary: where the same prompt resumes."""

    LATEST = 2
    """The last boundary that a request computed: where its next turn resumes."""

    LADDER = 3
    """A boundary at some distance before the end of a prompt."""

    CHUNK = 4
    """The boundary where a prefill step ended by itself, and left a state."""

    JUNCTION = 5
    """The boundary up to which full attention hit, and the sparse groups did not."""

    WANTED = 6
    """A boundary that an earlier request had computed and that is gone."""

    HINT = 7
    """A boundary that the request names."""

    OVERLAP = 8
    """A boundary whose tails are complete because blocks are kept for other boundaries."""

    USE = 9
    """A boundary that a request has resumed from, for whatever reason it was kept at first."""


STEPS_END_AT = frozenset({Origin.JUNCTION, Origin.WANTED, Origin.HINT})
"""The origins that are worth a prefill step if a state exists only at the end of a step."""


class Reason(NamedTuple):
    """Why a checkpoint is kept. Checkpoints are judged by their reason until they are used.

    ``step`` is the rung of a ladder. For a LATEST boundary, 1 means that it is also the replay
    boundary. For a CHUNK, 1 means the last whole block of a prompt.
    """

    origin: Origin
    step: int = 0
