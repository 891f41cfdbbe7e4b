# SPDX-License-Identifier: Apache-2.0
"""How long the scheduler side waits for a shared tier, and how much of it is under way at once."""

from vllm_ascend_kvext.shared_tier import backend

MAX_LOOKUP_S = 0.05
"""A request goes on without an answer if the tier takes longer for one."""

MAX_QUEUED_S = 1.0
"""A request goes on without an answer if its question stands behind others for longer."""

MAX_STALL_S = 0.2
"""A request goes on if nothing of what is got has come for longer."""

MAX_UNKNOWN_S = 2.0
"""Computing is taken to need this long while its speed is not known yet."""

MAX_HANG_S = backend.MAX_HANG_S
"""A get or a touch that takes longer hangs."""

PAUSE_S = 5.0
"""A tier that is slow, or has failed, is left alone for this long."""

MAX_ASKED = 16
"""This many requests at most are asked for in one step. Others are asked for in a later one."""

MAX_BEHIND = 128
"""This many requests at most wait to be asked for. Those behind them may begin without: the
scheduler looks at all that wait in every step."""

MAX_PUT_SHARE = 1 / 8
"""This share of host memory at most is pinned because it is being put."""

MAX_GET_SHARE = 1 / 2
"""This share of host memory at most is taken by what is being got."""

MAX_QUIET_S = 5.0
"""Jobs of which none has moved for longer hang: no step is made for them."""

MAX_ABANDONED = 8
"""The tier is not asked any more while this many objects hang."""

TOUCH_EVERY_S = 1.0
"""The tier is told at most this often that an object is used."""

MAX_TOUCHED = 256
"""This many objects at most are being touched at once. Others wait for these."""

REMEMBERED_TOUCHES = 1 << 14
"""Of this many objects it is known when they were touched. This many at most wait for it."""

MAX_SILENT_REPORTS = 3
"""What a worker gets is reported one or two steps later: so many reports without any are usual."""

IDLE_WAIT_S = 0.001
"""A step that computes nothing waits this long for an answer."""
