# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Whether answers come back is learned from the keys of prompts, and decides what is kept."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.answers import MAX_WEIGHT, NOTHING_SEEN, Answers, Seen

UNIT_TOKENS = 2


@dataclass
class Chat:
    """A conversation, as its prompts show it.

    Attributes:
        is_stripped: Whether its prompts leave out what was answered before.
    """

    name: str
    is_stripped: bool
    salt: str = ""
    text: str = ""
    num_turns: int = 0

    def take_turn(self, answers: Answers) -> float:
        """Send one prompt, and answer it. Returns the chance that is given to the answer."""
        self.num_turns += 1
        prompt = f"{self.text}{self.name}{self.num_turns:03}"
        answered = f"{prompt}{self.name}ans{self.num_turns:03}"
        prefix = TextPrefix(answered)
        seen, _ = answers.note_prompt(TextPrefix(prompt), len(prompt), self.salt)
        chance = answers.note_ended(prefix, len(prompt), len(answered), seen, self.salt)
        self.text = prompt if self.is_stripped else answered
        return chance


def chats(number: int, is_stripped: bool, salt: str = "") -> list[Chat]:
    return [Chat(chr(0x4E00 + index), is_stripped, salt) for index in range(number)]


def test_nothing_is_known_at_the_beginning() -> None:
    assert Chat("a", True).take_turn(Answers(UNIT_TOKENS)) == 0.5


@pytest.mark.parametrize("is_stripped", [False, True])
def test_what_a_conversation_does_is_known_after_tens_of_requests(is_stripped: bool) -> None:
    answers = Answers(UNIT_TOKENS)
    for _ in range(3):
        given = [chat.take_turn(answers) for chat in chats(10, is_stripped)]
    conversations = chats(10, is_stripped)
    for _ in range(3):
        given = [chat.take_turn(answers) for chat in conversations]
    if is_stripped:
        assert max(given) < 1 / 16
    else:
        assert min(given) > 0.9


def test_conversations_of_both_kinds_are_told_apart() -> None:
    answers = Answers(UNIT_TOKENS)
    both = [Chat(chr(0x4E00 + index), index % 2 == 0) for index in range(20)]
    for _ in range(6):
        given = {chat.name: chat.take_turn(answers) for chat in both}
    assert max(given[chat.name] for chat in both if chat.is_stripped) < 0.2
    assert min(given[chat.name] for chat in both if not chat.is_stripped) > 0.8


def test_first_turns_go_by_their_salt() -> None:
    answers = Answers(UNIT_TOKENS)
    for is_stripped in (False, True):
        conversations = chats(12, is_stripped, salt=str(is_stripped))
        for _ in range(4):
            for chat in conversations:
                chat.take_turn(answers)
    assert Chat("x", True, salt="True").take_turn(answers) < 0.1
    assert Chat("y", False, salt="False").take_turn(answers) > 0.9
    assert 0.1 < Chat("z", False, salt="new").take_turn(answers) < 0.9


def test_a_habit_that_changes_is_learned_again() -> None:
    answers = Answers(UNIT_TOKENS)
    conversations = chats(40, is_stripped=False)
    for _ in range(5):
        for chat in conversations:
            chat.take_turn(answers)
    for chat in conversations:
        chat.is_stripped = True
        chat.text = ""
    others = [Chat(chr(0x5E00 + index), True) for index in range(40)]
    for _ in range(3):
        given = [chat.take_turn(answers) for chat in others]
    assert max(given) < 0.1


def test_a_prompt_that_is_sent_again_says_nothing() -> None:
    answers = Answers(UNIT_TOKENS)
    seen, _ = answers.note_prompt(TextPrefix("abcd"), 4, "")
    answers.note_ended(TextPrefix("abcdefgh"), 4, 8, seen, "")
    assert answers.note_prompt(TextPrefix("abcd"), 4, "") == (NOTHING_SEEN, 0)
    assert answers.note_prompt(TextPrefix("abxxxx"), 6, "") == (NOTHING_SEEN, 0)
    # The prompt goes on, with its answer. This is counted once.
    assert answers.note_prompt(TextPrefix("abcdefgh"), 8, "") == (Seen(1, 1), 4)
    assert answers.note_prompt(TextPrefix("abcdefgh"), 8, "") == (NOTHING_SEEN, 0)


@pytest.mark.parametrize(("prompt", "answered"), [("a", "abcdef"), ("abcd", "abcde"), ("", "ab")])
def test_answers_that_reach_no_boundary_are_not_counted(prompt: str, answered: str) -> None:
    answers = Answers(UNIT_TOKENS)
    answers.note_ended(TextPrefix(answered), len(prompt), len(answered), NOTHING_SEEN, "")
    longer = TextPrefix(answered + "0123456789")
    assert answers.note_prompt(longer, longer.num_tokens, "") == (NOTHING_SEEN, 0)


def test_memory_is_bounded_and_can_be_cleared() -> None:
    answers = Answers(UNIT_TOKENS, max_keys=10)
    for chat in chats(50, is_stripped=True):
        chat.take_turn(answers)
    assert len(answers._ended) == 10
    answers.clear()
    assert not answers._ended and Chat("a", True).take_turn(answers) == 0.5


def test_old_answers_count_less() -> None:
    seen = NOTHING_SEEN
    for _ in range(1000):
        seen = seen.with_answer(True)
    assert seen.num_all == pytest.approx(MAX_WEIGHT)
    chance = random.Random(0)
    for _ in range(1000):
        seen = seen.with_answer(chance.random() < 0.25)
    assert seen.chance(0.5, 0.0) == pytest.approx(0.25, abs=0.2)
