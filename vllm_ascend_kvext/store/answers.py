# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Learns whether answers come back: whether later prompts contain what was answered before.

A chat sends its answers back with the next turn. A model that reasons does not: its template leaves
the reasoning out, and the next prompt goes on where the earlier prompt ended. Two keys tell one
from the other, and no tokens are read::

    a request that has ended     prompt ........... P | answer .... A ....
    a later prompt               prompt ........... P | ........... A ....    the answer came back
                                 prompt ........... P | ........... B ....    it was left out

P is the last boundary within the prompt, and A is the first boundary behind it. A conversation
mostly goes on as it began. So the conversation decides, then its ``cache_salt``, then all requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.store.prefix import Prefix
from vllm_ascend_kvext.store.remembered_keys import RememberedKeys

MAX_WEIGHT = 32.0
"""The number of answers after which older ones count less."""

_PRIOR_WEIGHT = 2.0
"""The number of answers as which the assumed probability counts."""

_MAX_SALTS = 4096
"""The number of salts whose answers are counted."""


class Seen(NamedTuple):
    """How many answers were seen, and how many of them came back."""

    num_back: float = 0.0
    num_all: float = 0.0

    def with_answer(self, is_back: bool) -> Seen:
        """The counts with one more answer."""
        kept = min(1.0, (MAX_WEIGHT - 1) / max(1.0, self.num_all))
        return Seen(self.num_back * kept + is_back, self.num_all * kept + 1)

    def chance(self, assumed: float, weight: float) -> float:
        """The probability that an answer comes back, if it is assumed where little was seen."""
        return (self.num_back + weight * assumed) / (self.num_all + weight)


NOTHING_SEEN = Seen()
"""No answers."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has ended: the first key behind its prompt, and its conversation."""

    answer_key: bytes
    conversation: Seen


class Answers:
    """The answers of one engine. A call costs a look-up of the keys of one prompt.

    Args:
        unit_tokens: The tokens between two boundaries.
        max_keys: The most ended requests that are remembered.
    """

    def __init__(self, unit_tokens: int, max_keys: int = 1 << 14) -> None:
        self._unit_tokens = unit_tokens
        self._ended: RememberedKeys[_Ended] = RememberedKeys(max_keys)
        self._salts: RememberedKeys[Seen] = RememberedKeys(_MAX_SALTS)
        self._all = NOTHING_SEEN

    def clear(self) -> None:
        """Forget everything."""
        self._ended.clear()
        self._salts.clear()
        self._all = NOTHING_SEEN

    def note_prompt(self, prefix: Prefix, prompt_tokens: int, salt: str) -> tuple[Seen, int]:
        """Learn from a prompt whether answers before it came back.

        Returns:
            What was seen in the conversation of the prompt. Where the first answer begins that came
            back; 0 if none did.
        """
        unit_tokens = self._unit_tokens
        keys = prefix.keys_at(range(unit_tokens, prompt_tokens + 1, unit_tokens))
        conversation = NOTHING_SEEN
        first_back_tokens = 0
        place = 0
        for key in list(filter(self._ended.__contains__, keys)):
            place = keys.index(key, place)
            if place + 1 == len(keys):
                break  # The prompt does not go on.
            ended = self._ended.pop(key)
            is_back = keys[place + 1] == ended.answer_key
            if is_back and not first_back_tokens:
                first_back_tokens = (place + 1) * unit_tokens
            conversation = ended.conversation.with_answer(is_back)
            of_salt = self._salts.get(salt.encode(), NOTHING_SEEN)
            self._salts.put(salt.encode(), of_salt.with_answer(is_back))
            self._all = self._all.with_answer(is_back)
        return conversation, first_back_tokens

    def note_ended(
        self, prefix: Prefix, prompt_tokens: int, end_tokens: int, conversation: Seen, salt: str
    ) -> float:
        """Remember a request that has ended.

        Args:
            end_tokens: The end of its tokens that have keys. These tokens include its answer.
            conversation: What `note_prompt` returned for its prompt.

        Returns:
            The probability that its answer comes back.
        """
        boundary = prompt_tokens - prompt_tokens % self._unit_tokens
        if boundary > 0 and boundary + self._unit_tokens <= end_tokens:
            answer_key = prefix.key_at(boundary + self._unit_tokens)
            self._ended.put(prefix.key_at(boundary), _Ended(answer_key, conversation))
        return self.chance(conversation, salt)

    def chance(self, conversation: Seen, salt: str) -> float:
        """The probability that the answer to a prompt comes back.

        Args:
            conversation: What `note_prompt` returned for the prompt.
        """
        of_all = self._all.chance(0.5, _PRIOR_WEIGHT)
        of_salt = self._salts.get(salt.encode(), NOTHING_SEEN).chance(of_all, _PRIOR_WEIGHT)
        return conversation.chance(of_salt, 1.0)
