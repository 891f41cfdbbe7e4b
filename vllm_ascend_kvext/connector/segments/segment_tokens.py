# SPDX-License-Identifier: Apache-2.0
"""Token ids of what stands before and between segments, from the model and its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.connector.common.options import CONFIG, ConnectorOptions
from vllm_ascend_kvext.errors import SettingsError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class SegmentTokens(NamedTuple):
    """What segments are computed behind, and what stands between them; see ``ConnectorOptions``."""

    sink_ids: tuple[int, ...] = ()
    separator_ids: tuple[int, ...] = ()


NO_SEGMENT_TOKENS = SegmentTokens()


def segment_tokens_of(model: ModelConfig, options: ConnectorOptions) -> SegmentTokens:
    """What segments are computed behind, and what separates them.

    Raises:
        SettingsError: If one of them is a text of which the tokenizer makes nothing, or there is no
            tokenizer.
    """
    if not options.blending:
        return NO_SEGMENT_TOKENS
    return SegmentTokens(_sink_ids(model, options), _separator_ids(model, options))


def _sink_ids(model: ModelConfig, options: ConnectorOptions) -> tuple[int, ...]:
    sink = options.segment_sink
    if sink is not None and not isinstance(sink, str):
        return sink
    first = getattr(model.hf_text_config, "bos_token_id", None)
    if isinstance(first, list):
        first = first[0] if first else None
    first_ids = () if first is None else (int(first),)
    return first_ids if sink is None else (*first_ids, *_tokenize(model, "segment_sink", sink))


def _separator_ids(model: ModelConfig, options: ConnectorOptions) -> tuple[int, ...]:
    separator = options.segment_separator
    if separator is None:
        return ()
    if not isinstance(separator, str):
        return separator
    return _tokenize(model, "segment_separator", separator)


def _tokenize(model: ModelConfig, key: str, text: str) -> tuple[int, ...]:
    if model.skip_tokenizer_init:
        raise _wrong(key, text, "token ids, because the engine has no tokenizer")
    from vllm.tokenizers import cached_tokenizer_from_config

    token_ids = cached_tokenizer_from_config(model).encode(text, add_special_tokens=False)
    if not token_ids:
        raise _wrong(key, text, "a text that is at least one token")
    return tuple(token_ids)


def _wrong(key: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        f"{CONFIG}: {key}: expected {expected}, found {found!r}. Correct it, or leave the key out."
    )
