# SPDX-License-Identifier: Apache-2.0
"""Every key of the option ``segments``: its default, its values and what it does.

The fields of `SegmentOptions` are the one declaration, see ``declared``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from vllm_ascend_kvext.connector.common.option_values import (
    FLAG,
    NATURAL_NUMBER,
    RATIO,
    Values,
    are_natural,
    choice,
    parse_values,
    wrong_value,
)
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.declared import declared
from vllm_ascend_kvext.store.store_policy import StorePolicy

OPTION = "segments"
"""The key of ``kv_connector_extra_config`` whose value is an object of the keys below."""

FORMER_KEYS: Mapping[str, str] = {
    "blending": '"segments": {}, or nothing where it was false,',
    "blend_selector": '"segments": {"selector": ...}',
    "blend_head_tokens": '"segments": {"head_tokens": ...}',
    "blend_ratio": '"segments": {"ratio": ...}',
    "blend_check_layer": '"segments": {"check_layer": ...}',
    "segment_separator": '"segments": {"separator": ...}',
    "segment_sink": '"segments": {"sink": ...}',
    "segment_context": '"segments": {"context": ...}',
    "learn_segments": '"segments": {"learn": ...}',
}
"""What stands in place of the keys that had no object of their own."""


class Selector(enum.Enum):
    """How the tokens of reused segments are chosen that are computed after all."""

    HEADS = "heads"
    QUESTION = "question"


_SINK = Values(
    "a text that is not empty, or a list of token ids",
    lambda value: bool(value) if isinstance(value, str) else are_natural(value),
    lambda value: value if isinstance(value, str) else tuple(value),
)
_SEPARATOR = Values(
    "a text, or a list of token ids, that is not empty",
    lambda value: bool(value) and _SINK.accepts(value),
    _SINK.make,
)


@dataclass(frozen=True, slots=True)
class SegmentOptions:
    """The keys of the object ``segments``.

    An object, whose keys are below; `{}` has the default of each. It turns segments on: documents
    whose KV was stored by itself are reused wherever they stand in a prompt, with their keys
    rotated to the new positions. **Approximate**: a reused token has not seen what stands before
    its segment, and answers change. See `docs/blending.md`. Unset: no segment is reused.
    """

    selector: Annotated[Selector | None, choice(Selector)] = None
    """Which tokens of reused segments are computed. `heads`: the first `head_tokens` of each.
    `question`: these, and behind them what the question attends to. What follows the last segment
    is computed once, at the price of one more step, only to find that out. Not with a
    `cudagraph_mode` of `FULL`, nor without full attention: there it is `heads`, and the log says
    why. Unset: `question` on a CPU, where that can be."""

    head_tokens: Annotated[int | None, NATURAL_NUMBER] = None
    """How many first tokens of each reused segment are computed. Segments shorter than twice that
    are computed whole. `0` reuses segments as they are. Unset: 4 where the question chooses others,
    else 16."""

    ratio: Annotated[float, RATIO] = 0.16
    """With `selector` `question`: this part of the tokens behind heads is computed, but no less
    than one run of each segment. `1.0` computes all of them."""

    check_layer: Annotated[int | None, NATURAL_NUMBER] = None
    """With `selector` `question`: the layer at which the question is compared with the segments,
    counted from 0 in the order of the model, among those with pages of their own. It must have full
    attention. Unset: the one next to three fifths of the model."""

    separator: Annotated[str | tuple[int, ...] | None, _SEPARATOR] = None
    """What stands between two of these separators in a prompt is a segment, where a request names
    none. A text, which is tokenized once, without special tokens, or a list of token ids. Unset:
    only segments that a request names are reused."""

    sink: Annotated[str | tuple[int, ...] | None, _SINK] = None
    """What segments are computed behind. A text, which is tokenized once, without special tokens,
    and follows the model's token for the beginning of a sequence, if it has one; or a list of token
    ids. Unset: that token alone, and with `context` what prompts begin with; `[]` is nothing. See
    `docs/blending.md`."""

    context: Annotated[bool | None, FLAG] = None
    """`true`: segments are computed, too, behind what prompts of their `cache_salt` begin with, and
    that and two or eight of the first documents that were stored under it. Answers come nearer to
    those without reuse, and may be taken from these documents; see `docs/blending.md`. Unset:
    `true` where the question chooses what is computed, which lets little of them through, unless
    `learn` is `false`."""

    learn: Annotated[bool | None, FLAG] = None
    """`true`: a segment that two requests had, and that no client has stored, is computed by itself
    and stored while no request waits to be admitted. `false`: only clients store segments. Unset:
    `true` where `separator` is set, but for `store_policy` `never`."""

    def learns_new(self, store_policy: StorePolicy) -> bool:
        """Whether segments are learned: clients who only put separators do not store any."""
        if self.learn is None:
            return self.separator is not None and store_policy is not StorePolicy.NEVER
        return self.learn


SEGMENT_OPTIONS = declared(SegmentOptions)


def parse_segment_options(value: Any, options: ConnectorOptions) -> SegmentOptions:
    """Read and validate the object ``segments``.

    Raises:
        SettingsError: If it is no object, a key is not in `SEGMENT_OPTIONS`, a value is wrong, or
            the connector's options exclude segments.
    """
    if not isinstance(value, Mapping):
        raise wrong_value(
            OPTION,
            value,
            'an object, such as {} or {"separator": "##"}',
            "Correct it, or leave the key out: then no segments are reused.",
        )
    found = SegmentOptions(**parse_values(value, SEGMENT_OPTIONS, OPTION))
    if not options.hole_reuse:
        raise wrong_value(
            OPTION,
            value,
            "hole_reuse, by which the tokens between segments are computed",
            "Set hole_reuse to true, or leave segments out.",
        )
    return found
