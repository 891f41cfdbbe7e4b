# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How long the scheduler side waits for a shared tier, and how much of it is under way at once."""

from vllm_ascend_kvext.shared_tier import backend

MAX_LOOKUP_S = 0.05
"""The longest time that the tier may take for an answer. If an answer takes longer, the request
goes on without it."""

MAX_QUEUED_S = 1.0
"""The longest time that a question may wait behind other questions. After this time, the request
goes on without an answer."""

MAX_STALL_S = 0.2
"""The longest time without any bytes of gets. After this time, requests wait for these gets no
longer."""

MAX_UNKNOWN_S = 2.0
"""The assumed time of computing as long as its speed is not known."""

MAX_HANG_S = backend.MAX_HANG_S
"""A get or a touch that takes longer hangs."""

PAUSE_S = 5.0
"""A tier that is slow, or has failed, is left alone for this time."""

MAX_ASKED = 16
"""The most requests for which the tier is asked in one step. Further requests wait for a later
step."""

MAX_BEHIND = 128
"""The most requests that wait until the tier is asked for them.

Requests behind these may begin without an answer. Otherwise the scheduler would look at all waiting
requests in every step.
"""

MAX_PUT_SHARE = 1 / 8
"""The largest share of host memory that is pinned because it is being put."""

MAX_GET_SHARE = 1 / 2
"""The largest share of host memory that gets under way may take."""

MAX_QUIET_S = 5.0
"""If no job has moved for this time, all jobs hang, and no step is made for them."""

MAX_ABANDONED = 8
"""While this many objects hang, the tier is not asked any more."""

TOUCH_EVERY_S = 1.0
"""The shortest time between two messages to the tier that the same object is used."""

MAX_TOUCHED = 256
"""The most objects that are being touched at once. Further objects wait for these touches."""

REMEMBERED_TOUCHES = 1 << 14
"""The number of objects whose last touch is remembered. At most this many objects wait to be
touched."""

MAX_SILENT_REPORTS = 3
"""The usual maximum of reports without bytes. Workers report gets one or two steps later."""

IDLE_WAIT_S = 0.001
"""The longest time that a step without a forward waits for an answer."""
