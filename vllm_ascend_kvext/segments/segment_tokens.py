# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The token ids that stand before and between segments, from the model and its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.connector.common.option_values import wrong_value
from vllm_ascend_kvext.segments.options import OPTION, SegmentOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class SegmentTokens(NamedTuple):
    """The tokens of the sink and of the separator; see ``SegmentOptions``.

    ``first_ids`` are the tokens that tokenizers put before a text. They are empty if the sink does
    not begin with them.
    """

    sink_ids: tuple[int, ...] = ()
    separator_ids: tuple[int, ...] = ()
    first_ids: tuple[int, ...] = ()


NO_SEGMENT_TOKENS = SegmentTokens()


def segment_tokens_of(model: ModelConfig, options: SegmentOptions) -> SegmentTokens:
    """The tokens of the sink and of the separator, for one model.

    Raises:
        SettingsError: The sink or the separator is a text, but there is no tokenizer, or the
            tokenizer makes no token of the text. Or the sink or the separator has token ids that
            the model does not have.
    """
    first_ids = _first_ids(model)
    sink = options.sink
    if isinstance(sink, str):
        sink = (*first_ids, *_tokenize(model, "sink", sink))
    elif sink is None:
        sink = first_ids
    else:
        _refuse_unknown_ids(model, "sink", sink)
    first_ids = first_ids if sink[: len(first_ids)] == first_ids else ()
    return SegmentTokens(sink, _separator_ids(model, options), first_ids)


def _first_ids(model: ModelConfig) -> tuple[int, ...]:
    first = getattr(model.hf_text_config, "bos_token_id", None)
    if isinstance(first, list):
        first = first[0] if first else None
    return () if first is None else (int(first),)


def _separator_ids(model: ModelConfig, options: SegmentOptions) -> tuple[int, ...]:
    separator = options.separator
    if separator is None:
        return ()
    if not isinstance(separator, str):
        _refuse_unknown_ids(model, "separator", separator)
        return separator
    return _tokenize(model, "separator", separator)


def _tokenize(model: ModelConfig, key: str, text: str) -> tuple[int, ...]:
    if model.skip_tokenizer_init:
        raise wrong_value(
            f"{OPTION}: {key}", text, "token ids, because the engine has no tokenizer"
        )
    from vllm.tokenizers import cached_tokenizer_from_config

    token_ids = cached_tokenizer_from_config(model).encode(text, add_special_tokens=False)
    if not token_ids:
        raise wrong_value(f"{OPTION}: {key}", text, "a text that is at least one token")
    return tuple(token_ids)


def _refuse_unknown_ids(model: ModelConfig, key: str, token_ids: tuple[int, ...]) -> None:
    last = model.get_vocab_size() - 1
    unknown = [token_id for token_id in token_ids if token_id > last]
    if unknown:
        raise wrong_value(
            f"{OPTION}: {key}", unknown, f"token ids of 0 to {last}, the model's vocabulary"
        )
