# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Learns at which tails requests resume, and how much it pays to keep tails until then.

A request uses all rows of its prefix, but only the tails at one boundary: the latest one. The
earlier tails of a conversation are of no use any more once it has gone on, although each turn asks
for the rows before them. So tails wait until a request resumes at them. ``reuse`` says how their
density is learned.

Tails at the end of a prompt or of an answer are counted by themselves once a request has passed
them, because it resumed at later ones. Otherwise they would hide how soon the last tails of a
conversation are used, and would look as if they waited for a long time. The same holds for tails at
the end of a prompt whose answer has left tails: the next turn resumes at the end of the answer,
unless it leaves something of the answer out. Other tails stay as they are: where prompts part once,
they part again, whether or not some prompts go on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from vllm_ascend_kvext.store.reuse import Reuse

MIN_RESUMES = 2
"""If requests have resumed at tails this many times, more requests are expected to."""


class TailOrigin(enum.IntEnum):
    """Why tails were stored, and what has happened to them since.

    Tails of one origin are expected to be used at the same rate.
    """

    ASKED = 0
    """Requests ask for the boundary, or prompts part there."""

    UNASKED = 1
    """No request has asked for the boundary yet."""

    END_OF_TURN = 2
    """The answer ends there."""

    END_OF_PROMPT = 3
    """The prompt ends there."""

    END_OF_LATER_TURN = 4
    """The answer to a prompt that continues an earlier prompt ends there."""

    END_OF_LATER_PROMPT = 5
    """A prompt that continues an earlier prompt ends there. Chats go on more often than questions
    about a document, which continue none."""

    PASSED = 6
    """A prompt or an answer ends there, and a request has resumed at later tails."""

    ANSWERED = 7
    """A prompt ends there, and its answer has left tails, too."""


ENDS_OF_TURNS = frozenset({TailOrigin.END_OF_TURN, TailOrigin.END_OF_LATER_TURN})

_ENDS_OF_PROMPTS = frozenset({TailOrigin.END_OF_PROMPT, TailOrigin.END_OF_LATER_PROMPT})

_ENDS = ENDS_OF_TURNS | _ENDS_OF_PROMPTS | {TailOrigin.ANSWERED}


class Resumes:
    """Counts at which tails requests resume, whether the tails are stored or not.

    Args:
        max_keys: The most tails that are known.
    """

    def __init__(self, max_keys: int) -> None:
        self._reuse = Reuse(max_keys)

    def clear(self) -> None:
        """Forget everything."""
        self._reuse.clear()

    def num_until_known(self, keys: Sequence[bytes]) -> int:
        """The number of boundaries up to the last one with known tails, of ascending boundaries."""
        return self._reuse.num_until_known(keys)

    def note_admitted(self, keys: Sequence[bytes], now: int) -> int:
        """Count where a request resumes: at the latest known tails of its prompt.

        Args:
            keys: The keys of all boundaries at which it may resume, ascending.
            now: The use of its admission, which is later than all uses before.

        Returns:
            The number of boundaries up to the one where it resumes.
        """
        number = self.num_until_known(keys)
        self._reuse.change_origin(keys[: max(0, number - 1)], _ENDS, TailOrigin.PASSED, now)
        self._reuse.note_ended(keys[number - 1 : number] if number else (), (), now)
        return number

    def note_tails(self, key: bytes, origin: TailOrigin, now: int) -> None:
        """Note that a request leaves tails at a boundary, whether or not there is room for them."""
        self._reuse.note_new(key, origin, now)

    def note_answered(self, keys: Sequence[bytes], now: int) -> None:
        """Note that an answer leaves tails.

        Args:
            keys: The keys of all boundaries before these tails, ascending.
            now: The latest use of all.
        """
        number = self.num_until_known(keys)
        latest = keys[number - 1 : number] if number else ()
        self._reuse.change_origin(latest, _ENDS_OF_PROMPTS, TailOrigin.ANSWERED, now)

    def is_shared(self, key: bytes) -> bool:
        """Whether several requests have resumed at tails, so that more are expected to.

        A conversation resumes once at the end of a turn, and once where its reasoning was left out.
        These tails are of no use any more once it has gone on.
        """
        # The request that left the tails counts, too.
        return self._reuse.num_asked(key) > MIN_RESUMES

    def density(self, key: bytes, use: int, now: int) -> float:
        """See `Reuse.density`."""
        return self._reuse.density(key, use, now)
