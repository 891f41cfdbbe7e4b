# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The token ids of what segments are computed behind, and of what separates them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.segments.options import SegmentOptions
from vllm_ascend_kvext.segments.segment_tokens import SegmentTokens, segment_tokens_of

VOCABULARY_TOKENS = 128


class Letters:
    """A tokenizer. The token of a letter is the letter's number."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text if letter != "."]


@pytest.fixture(autouse=True)
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces ``vllm.tokenizers``."""
    module = ModuleType("vllm.tokenizers")
    module.cached_tokenizer_from_config = lambda model: Letters()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)


def tokens(first: Any = 1, has_tokenizer: bool = True, **options: Any) -> SegmentTokens:
    model: Any = SimpleNamespace(
        hf_text_config=SimpleNamespace(bos_token_id=first),
        skip_tokenizer_init=not has_tokenizer,
        get_vocab_size=lambda: VOCABULARY_TOKENS,
    )
    return segment_tokens_of(model, SegmentOptions(**options))


@pytest.mark.parametrize(("first", "expected"), [(1, (1,)), (None, ()), ([7, 8], (7,)), ([], ())])
def test_the_sink_is_the_token_for_the_beginning(first: Any, expected: tuple[int, ...]) -> None:
    assert tokens(first, has_tokenizer=False) == SegmentTokens(expected, (), expected)


def test_token_ids_take_its_place() -> None:
    assert tokens(sink=(1, 6)) == SegmentTokens((1, 6), (), (1,))
    assert tokens(sink=(5, 6)) == SegmentTokens((5, 6))
    assert tokens(sink=()) == SegmentTokens()


def test_a_text_follows_it() -> None:
    assert tokens(sink="ab") == SegmentTokens((1, 97, 98), (), (1,))
    assert tokens(None, sink="ab").sink_ids == (97, 98)


def test_separators_are_tokenized_by_themselves() -> None:
    assert tokens(separator="#").separator_ids == (35,)
    assert tokens(separator=(3,)).separator_ids == (3,)


@pytest.mark.parametrize("key", ["sink", "separator"])
@pytest.mark.parametrize(
    ("text", "has_tokenizer", "expected"),
    [("ab", False, "token ids, because"), (".", True, "a text that is at least one token")],
)
def test_a_text_of_which_nothing_is_made_is_refused(
    key: str, text: str, has_tokenizer: bool, expected: str
) -> None:
    with pytest.raises(
        SettingsError, match=f"segments: {key}: expected {expected}.*found '{text}'"
    ):
        tokens(has_tokenizer=has_tokenizer, **{key: text})


@pytest.mark.parametrize("key", ["sink", "separator"])
def test_token_ids_are_those_of_the_vocabulary(key: str) -> None:
    last = VOCABULARY_TOKENS - 1
    assert (last,) in tokens(**{key: (last,)})
    with pytest.raises(SettingsError) as raised:
        tokens(**{key: (3, last + 1, 1 << 40)})
    assert f"{key}: expected token ids of 0 to {last}, the model's vocabulary, found " in (
        str(raised.value)
    )
    assert f"[{last + 1}, {1 << 40}]. Correct it, or leave the key out" in str(raised.value)
