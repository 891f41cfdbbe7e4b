# SPDX-License-Identifier: Apache-2.0
"""Token ids of what stands before and between segments, from the model and its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.connector.options import CONFIG, ConnectorOptions
from vllm_ascend_kvext.errors import SettingsError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class SegmentTokens(NamedTuple):
    """Token ids that segments depend on, see ``ConnectorOptions``.

    Attributes:
        sink_ids: What segments are computed behind.
        separator_ids: What stands between them; nothing if only requests name segments.
    """

    sink_ids: tuple[int, ...] = ()
    separator_ids: tuple[int, ...] = ()


NO_SEGMENT_TOKENS = SegmentTokens()


def segment_tokens_of(model: ModelConfig, options: ConnectorOptions) -> SegmentTokens:
    """What segments are computed behind, and what separates them.

    Raises:
        SettingsError: If the separator is a text of which the tokenizer makes nothing, or there is
            no tokenizer.
    """
    if not options.blending:
        return SegmentTokens()
    return SegmentTokens(_sink_ids(model, options), _separator_ids(model, options))


def _sink_ids(model: ModelConfig, options: ConnectorOptions) -> tuple[int, ...]:
    if options.segment_sink is not None:
        return options.segment_sink
    first = getattr(model.hf_text_config, "bos_token_id", None)
    if isinstance(first, list):
        first = first[0] if first else None
    return () if first is None else (int(first),)


def _separator_ids(model: ModelConfig, options: ConnectorOptions) -> tuple[int, ...]:
    separator = options.segment_separator
    if separator is None:
        return ()
    if not isinstance(separator, str):
        return separator
    if model.skip_tokenizer_init:
        raise _wrong(separator, "token ids, because the engine has no tokenizer")
    from vllm.tokenizers import cached_tokenizer_from_config

    token_ids = cached_tokenizer_from_config(model).encode(separator, add_special_tokens=False)
    if not token_ids:
        raise _wrong(separator, "a text that is at least one token")
    return tuple(token_ids)


def _wrong(separator: str, expected: str) -> SettingsError:
    return SettingsError(
        f"{CONFIG}: segment_separator: expected {expected}, found {separator!r}. Correct it, or "
        "leave the key out."
    )
