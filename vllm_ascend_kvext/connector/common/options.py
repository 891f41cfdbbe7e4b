# SPDX-License-Identifier: Apache-2.0
"""Every key of ``kv_connector_extra_config``: its default, its values and what they do.

The fields of `ConnectorOptions` are the one declaration, see ``declared``: parsing, error messages
and the page of settings follow from them. The layout's unit, of which a chunk is a multiple, is
known once the caches are registered, see `ConnectorOptions.chunk_tokens_of`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from vllm_ascend_kvext.declared import declared, did_you_mean
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.request_arguments import is_integer
from vllm_ascend_kvext.store.arena import ALIGNMENT_BYTES
from vllm_ascend_kvext.store.store_policy import StorePolicy


class Selector(enum.Enum):
    """How the tokens of reused segments are chosen that are computed after all."""

    HEADS = "heads"
    QUESTION = "question"


CONFIG = "kv_connector_extra_config"

_GIB = 1 << 30
_DEFAULT_CHUNK_TOKENS = 1024
_MAX_GIB = 1 << 30
_FLAGS = {"true": True, "false": False}
# Five digits: a slip such as 0-999999999 is not to take the memory of its numbers.
_CPU_RANGE = re.compile("([0-9]{1,5})(?:-([0-9]{1,5}))?")


class _Values(NamedTuple):
    """What a key may have.

    Attributes:
        expected: In words.
        accepts: Whether a value of the configuration is among them.
        make: The option's value, from one that is.
        words: All of them, where they are a few words.
    """

    expected: str
    accepts: Callable[[Any], bool]
    make: Callable[[Any], Any]
    words: tuple[str, ...] = ()


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or is_integer(value)


def _are_natural(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple))
    return is_list and all(is_integer(each) and each >= 0 for each in value)


def _choice(choices: type[enum.Enum]) -> _Values:
    words = tuple(choice.value for choice in choices)
    return _Values(f"one of {', '.join(words)}", lambda value: value in words, choices, words)


def _cpu_numbers(value: Any) -> tuple[int, ...]:
    """The CPUs of a list or a text, ascending; empty if something else is there."""
    if not isinstance(value, str):
        return tuple(sorted(set(value))) if _are_natural(value) else ()
    cpus: set[int] = set()
    for part in value.split(","):
        found = _CPU_RANGE.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            return ()
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(cpus))


_GIB_OF_MEMORY = _Values(
    f"a number above 0, up to {_MAX_GIB}, without quotes",
    lambda value: _is_number(value) and 0 < value <= _MAX_GIB,
    float,
)
_RATIO = _Values(
    "a number from 0 to 1, without quotes",
    lambda value: _is_number(value) and 0 <= value <= 1,
    float,
)
_POSITIVE_INTEGER = _Values(
    "an integer of at least 1, without quotes", lambda value: is_integer(value) and value > 0, int
)
_NATURAL_NUMBER = _Values(
    "an integer of at least 0, without quotes", lambda value: is_integer(value) and value >= 0, int
)
_FLAG = _Values(
    "true or false",
    # Strings come from command lines, where a value is quoted in JSON or it is not.
    lambda value: isinstance(value, (bool, str)) and str(value).strip().lower() in _FLAGS,
    lambda value: _FLAGS[str(value).strip().lower()],
)
_SINK = _Values(
    "a text that is not empty, or a list of token ids",
    lambda value: bool(value) if isinstance(value, str) else _are_natural(value),
    lambda value: value if isinstance(value, str) else tuple(value),
)
_SEPARATOR = _Values(
    "a text, or a list of token ids, that is not empty",
    lambda value: bool(value) and _SINK.accepts(value),
    _SINK.make,
)
_TIER_URL = _Values(
    "file:///path of a folder, or mooncake://host:port of a master",
    lambda value: re.match("file:///|mooncake://[^/]+:[0-9]{1,5}$", str(value)) is not None,
    str,
)
_CPUS = _Values(
    'numbers of CPUs, as a list such as [2, 3] or as a text such as "0-3,8"',
    lambda value: bool(_cpu_numbers(value)),
    _cpu_numbers,
)


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The options of one connector; all but the first two are keys of the configuration."""

    world_size: int = 1
    """Workers of the engine, who share the host memory."""

    has_chosen_chunk: bool = False
    """Whether ``chunk_tokens`` is the user's choice."""

    host_memory_gib: Annotated[float, _GIB_OF_MEMORY] = 8
    """Host memory of all workers of an engine together, in GiB. Each worker pins an equal part of
    it when the engine starts."""

    chunk_tokens: Annotated[int, _POSITIVE_INTEGER] = _DEFAULT_CHUNK_TOKENS
    """Rows of full-attention groups are stored in chunks of so many tokens. A multiple of the
    model's row unit (128 for DeepSeek-V4), and no more than the longest request, or the default:
    the engine refuses others when it starts, and names the nearest sizes. The default is rounded up
    to one. Whatever the chunk, prompts and answers are stored, and hit, up to the last row unit."""

    store_policy: Annotated[StorePolicy, _choice(StorePolicy)] = StorePolicy.SECOND_TOUCH
    """`second_touch`: stored is what ends of prompts and answers and other boundaries need that
    requests may resume from, and what a second request computes. `all`: everything that is
    computed. `never`: nothing."""

    state_policy: Annotated[StatePolicy, _choice(StatePolicy)] = StatePolicy.EXACT
    """`exact`: states (Mamba, compressors) are stored and loaded with the rest. `skip`: they are
    left out. That is lossy: what follows a loaded boundary is computed from other states, and
    answers change."""

    hole_reuse: Annotated[bool, _FLAG] = True
    """`true`: where a chunk is missing, what is stored behind it is loaded all the same, and the
    missing tokens alone are computed. `false`: all behind it is computed."""

    blending: Annotated[bool, _FLAG] = False
    """`true`: segments (documents whose KV was stored by themselves) are reused wherever they stand
    in a prompt, with their keys rotated to the new positions. **Approximate**: a reused token has
    not seen what stands before its segment, and answers change. See `docs/blending.md`."""

    blend_selector: Annotated[Selector | None, _choice(Selector)] = None
    """With `blending`: which tokens of reused segments are computed. `heads`: the first
    `blend_head_tokens` of each. `question`: these, and behind them what the question attends to.
    What follows the last segment is computed once, at the price of one more step, only to find that
    out. Not with a `cudagraph_mode` of `FULL`, nor without full attention: there it is `heads`, and
    the log says why. Unset: `question` on a CPU, where that can be."""

    blend_head_tokens: Annotated[int | None, _NATURAL_NUMBER] = None
    """With `blending`: so many first tokens of each reused segment are computed, and segments
    shorter than twice that are computed whole. `0` reuses segments as they are. Unset: 4 where the
    question chooses others, else 16."""

    blend_ratio: Annotated[float, _RATIO] = 0.16
    """With `blend_selector=question`: this part of the tokens behind heads is computed, but no less
    than one run of each segment. `1.0` computes all of them."""

    blend_check_layer: Annotated[int | None, _NATURAL_NUMBER] = None
    """With `blend_selector=question`: the layer at which the question is compared with the
    segments, counted from 0 in the order of the model, among those with pages of their own. It must
    have full attention. Unset: the one next to three fifths of the model."""

    segment_separator: Annotated[str | tuple[int, ...] | None, _SEPARATOR] = None
    """With `blending`: what stands between two of these separators in a prompt is a segment, where
    a request names none. A text, which is tokenized once, without special tokens, or a list of
    token ids. Unset: only segments that a request names are reused."""

    segment_sink: Annotated[str | tuple[int, ...] | None, _SINK] = None
    """With `blending`: what segments are computed behind. A text, which is tokenized once, without
    special tokens, and follows the model's token for the beginning of a sequence, if it has one; or
    a list of token ids. Unset: that token alone, and with `segment_context` what prompts begin
    with; `[]` is nothing. See `docs/blending.md`."""

    segment_context: Annotated[bool | None, _FLAG] = None
    """With `blending`. `true`: segments are computed, too, behind what prompts of their
    `cache_salt` begin with, and that and two or eight of the first documents that were stored under
    it. Answers come nearer to those without reuse, and may be taken from these documents; see
    `docs/blending.md`. Unset: `true` where the question chooses what is computed, which lets little
    of them through, unless `learn_segments` is `false`."""

    learn_segments: Annotated[bool | None, _FLAG] = None
    """With `blending`. `true`: a segment that two requests had, and that no client has stored, is
    computed by itself and stored while no request waits to be admitted. `false`: only clients store
    segments. Unset: `true` where `segment_separator` is set, but for `store_policy` `never`."""

    load_if_slower: Annotated[bool, _FLAG] = False
    """`true`: loads are made, and preempted requests stored, even where that is estimated to take
    longer than computing the same tokens. `false`: such loads are left out, logged and counted."""

    copy_cpus: Annotated[tuple[int, ...] | None, _CPUS] = None
    """The CPUs that copies run on: a list such as `[2, 3]`, or a text such as `"0-3,8"`. Unset:
    CPUs of the process that the model does not run on."""

    shared_tier: Annotated[str | None, _TIER_URL] = None
    """Where KV is kept that engines share and that outlives them: `file:///path` of a folder, or
    `mooncake://host:port` of the master of a Mooncake Store. See `docs/shared_tier.md`. Unset:
    nowhere."""

    shared_tier_bytes: Annotated[int | None, _POSITIVE_INTEGER] = None
    """With a folder as `shared_tier`: what it may hold, of all engines together. Unset: half of the
    file system. The size of a Mooncake Store is that of its own."""

    @property
    def spare_bytes(self) -> int:
        """What each place in host memory has behind its bytes, for their seal in a shared tier."""
        return ALIGNMENT_BYTES if (self.shared_tier or "").startswith("mooncake:") else 0

    @property
    def host_memory_bytes_per_worker(self) -> int:
        """The size of each worker's host buffer."""
        return int(self.host_memory_gib * _GIB) // self.world_size

    @property
    def learns_segments(self) -> bool:
        """Whether segments are learned: clients who only put separators do not store any."""
        if self.learn_segments is None:
            return self.segment_separator is not None and self.store_policy is not StorePolicy.NEVER
        return self.learn_segments

    def chunk_tokens_of(self, unit_tokens: int, max_model_len: int) -> int:
        """Tokens of a chunk, a multiple of the layout's unit.

        The default is rounded up to one, and is taken with any model.

        Args:
            max_model_len: Tokens of a request at most: a chunk of more is never whole.

        Raises:
            SettingsError: If the user has chosen another, or more; the message names the nearest
                sizes.
        """
        most = max(max_model_len, _DEFAULT_CHUNK_TOKENS)
        most += -most % unit_tokens
        if self.has_chosen_chunk and self.chunk_tokens > most:
            raise _wrong(
                "chunk_tokens",
                self.chunk_tokens,
                f"at most {most}, by which every request is one chunk (max_model_len is "
                f"{max_model_len})",
            )
        rest = self.chunk_tokens % unit_tokens
        below = self.chunk_tokens - rest
        above = below + unit_tokens if rest else below
        if not rest or not self.has_chosen_chunk:
            return above
        raise _wrong(
            "chunk_tokens",
            self.chunk_tokens,
            f"a multiple of {unit_tokens}, the tokens of this model's row unit",
            f"The nearest: {' or '.join(str(size) for size in (below, above) if size)}.",
        )


OPTIONS = declared(ConnectorOptions)


def parse_options(extra_config: Mapping[str, Any] | None, world_size: int) -> ConnectorOptions:
    """Read and validate the configuration of a connector.

    A key whose value is null is absent.

    Args:
        extra_config: ``kv_connector_extra_config``; None if there is none.
        world_size: Workers of the engine.

    Raises:
        SettingsError: If the configuration is no object, a key is not in `OPTIONS`, or a value is
            wrong.
    """
    if extra_config is None:
        extra_config = {}
    if not isinstance(extra_config, Mapping):
        raise SettingsError(
            f'{CONFIG}: expected an object, such as {{"host_memory_gib": 8}}, found '
            f"{extra_config!r}. Correct it, or leave it out for the defaults."
        )
    _refuse_unknown_keys(extra_config)
    values: dict[str, Any] = {}
    for option in OPTIONS:
        value = extra_config.get(option.key)
        if value is None:
            continue
        if not option.note.accepts(value):
            hint = did_you_mean(value, option.note.words).strip()
            raise _wrong(option.key, value, option.note.expected, hint)
        values[option.key] = option.note.make(value)
    options = ConnectorOptions(world_size, "chunk_tokens" in values, **values)
    if options.blending and not options.hole_reuse:
        raise _wrong(
            "blending",
            True,
            "hole_reuse, by which the tokens between segments are computed",
            "Set hole_reuse to true, or leave blending out.",
        )
    if options.shared_tier and options.state_policy is StatePolicy.SKIP:
        raise _wrong(
            "shared_tier",
            options.shared_tier,
            "state_policy=exact: other engines would take what is approximate for exact",
            "Set state_policy to exact, or leave shared_tier out.",
        )
    if options.shared_tier_bytes and (options.shared_tier or "").startswith("mooncake:"):
        raise _wrong(
            "shared_tier_bytes",
            options.shared_tier_bytes,
            "a folder as shared_tier: a Mooncake Store is as large as its mooncake_clients make it",
            "Leave it out.",
        )
    if not options.host_memory_bytes_per_worker:
        raise _wrong(
            "host_memory_gib",
            options.host_memory_gib,
            f"memory for {world_size} workers",
            "Give them more, or leave the connector out.",
        )
    return options


def _wrong(key: str, value: object, expected: str, remedy: str = "") -> SettingsError:
    remedy = remedy or "Correct it, or leave the key out for the default."
    return SettingsError(f"{CONFIG}: {key}: expected {expected}, found {value!r}. {remedy}")


def _refuse_unknown_keys(extra_config: Mapping[str, Any]) -> None:
    known = [option.key for option in OPTIONS]
    for key in extra_config:
        if key not in known:
            raise SettingsError(
                f"{CONFIG}: unknown key {key!r}: expected some of {', '.join(known)}."
                f"{did_you_mean(key, known)} Correct or remove it."
            )
