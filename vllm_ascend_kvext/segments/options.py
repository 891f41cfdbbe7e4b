# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every key of the option ``segments``: its default, its values and what it does.

The fields of `SegmentOptions` are the only declaration, see ``declared``.
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


class Selector(enum.Enum):
    """How the connector chooses which tokens of reused segments are computed nevertheless."""

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

    An object with the keys below; `{}` uses every default. It turns segments on: a document that
    was stored by itself is reused wherever it stands in a prompt. Its keys are rotated to the new
    positions. **Approximate**: a reused token has not seen what stands before its segment, so
    answers change. See `docs/blending.md`. Unset: no segment is reused.
    """

    selector: Annotated[Selector | None, choice(Selector)] = None
    """Which tokens of reused segments are computed. `heads`: the first `head_tokens` of each.
    `question`: the heads, and the tokens behind them that the question attends to. To find these,
    the text behind the last segment is computed once more, which costs one step. `question` needs
    a layer with full attention, and a `cudagraph_mode` other than `FULL`. Otherwise `heads` is
    used, and the log says why. Unset: `question` on a CPU that can do it, else `heads`."""

    head_tokens: Annotated[int | None, NATURAL_NUMBER] = None
    """How many first tokens of each reused segment are computed. Segments shorter than twice this
    number are computed whole. `0` reuses segments as they are. Unset: 4 where the question chooses
    further tokens, else 16."""

    ratio: Annotated[float, RATIO] = 0.16
    """With `selector` `question`: the share of the tokens behind heads that is computed. At least
    one run of each segment is computed. `1.0` computes all tokens."""

    check_layer: Annotated[int | None, NATURAL_NUMBER] = None
    """With `selector` `question`: the layer at which the question is compared with the segments.
    Layers with pages of their own are counted from 0, in the order of the model. The layer must
    have full attention. Unset: the layer nearest to three fifths of the model."""

    separator: Annotated[str | tuple[int, ...] | None, _SEPARATOR] = None
    """The text between two of these separators is a segment, in a prompt whose request names no
    segments. The value is a list of token ids, or a text. A text is tokenized once, without special
    tokens. Unset: only segments that a request names are reused."""

    sink: Annotated[str | tuple[int, ...] | None, _SINK] = None
    """The tokens that segments are computed behind: a list of token ids, or a text. A text is
    tokenized once, without special tokens, and follows the model's token for the beginning of a
    sequence, if the model has one. Unset: that beginning token alone; with `context`, also the
    common beginning of prompts. `[]`: no tokens. See `docs/blending.md`."""

    context: Annotated[bool | None, FLAG] = None
    """`true`: segments are also computed behind the common beginning of the prompts of their
    `cache_salt`, and behind this beginning and two or eight of the first documents of this salt.
    Answers come nearer to those without reuse, but may be taken from these documents; see
    `docs/blending.md`. Unset: `true` where the question chooses what is computed, because this lets
    little of these documents through. Unset with `learn` `false`: `false`."""

    learn: Annotated[bool | None, FLAG] = None
    """`true`: the engine computes and stores a segment that two requests had and that no client has
    stored. It does so while no request waits to be admitted. `false`: only clients store segments.
    Unset: `true` where `separator` is set and `store_policy` is not `never`."""

    def learns_new(self, store_policy: StorePolicy) -> bool:
        """Whether segments are learned.

        By default they are learned with separators, because clients then store none.
        """
        if self.learn is None:
            return self.separator is not None and store_policy is not StorePolicy.NEVER
        return self.learn


SEGMENT_OPTIONS = declared(SegmentOptions)


def parse_segment_options(value: Any, options: ConnectorOptions) -> SegmentOptions:
    """Read and validate the object ``segments``.

    Raises:
        SettingsError: The value is no object, a key is not in `SEGMENT_OPTIONS`, a value is wrong,
            or the connector's options exclude segments.
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
