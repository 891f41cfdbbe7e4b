# SPDX-License-Identifier: Apache-2.0
"""Every key of ``kv_connector_extra_config``: typed, documented, validated once.

Knows neither vLLM nor the model: the layout's unit, of which a chunk is a multiple, is known once
the caches are registered, see `ConnectorOptions.refuse_unsuited_chunk`.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.settings import HOLE_REUSE_VARIABLE, parse_reuses_holes
from vllm_ascend_kvext.store.store_policy import StorePolicy
from vllm_ascend_kvext.store.worth import EvictionRule


class Selector(enum.Enum):
    """How the tokens of reused segments are chosen that are computed after all."""

    HEADS = "heads"
    QUESTION = "question"


CONFIG = "kv_connector_extra_config"
STATE_POLICY_ALIAS = "LMCACHE_ASCEND_SKIP_STATE_GROUPS"

_GIB = 1 << 30
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_MOST_GIB = 1 << 30
# Five digits: a slip such as 0-999999999 is not to take the memory of its numbers.
_CPU_RANGE = re.compile("([0-9]{1,5})(?:-([0-9]{1,5}))?")

ChoiceT = TypeVar("ChoiceT", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The options of one connector. See `OPTIONS` for what they do.

    Attributes:
        world_size: Workers of the engine, who share the host memory.
        host_memory_gib: Of all workers together.
        chunk_tokens: Tokens of a chunk of rows.
        store_policy: What is stored.
        state_policy: What becomes of state groups.
        swap_on_preemption: Whether a preempted request's KV goes to host memory and comes back.
        hole_reuse: Whether what is stored behind a missing chunk is loaded.
        eviction: What gives way when the host memory is full.
        blending: Whether segments are reused wherever they stand in a prompt: approximate.
        blend_head_tokens: First tokens of each reused segment that are computed.
        blend_selector: How the tokens of reused segments are chosen that are computed after all.
        blend_ratio: Of the tokens behind heads: that are computed, with `Selector.QUESTION`.
        blend_run_tokens: That are chosen together.
        blend_check_layer: At which the question is compared with them, counted from the model's
            first; None leaves it to ``worker_segments``.
        blend_min_tokens: A shorter segment, or rest of one, is computed.
        blend_across_windows: Whether tokens are reused whose windows reach across the beginning of
            their segment.
        segment_separator: What stands between segments: text, or token ids; None finds none.
        segment_sink: What segments are computed behind: text behind the model's own token for the
            beginning of a sequence, or token ids; None takes that token, if the model has one.
        learn_segments: Whether segments are stored that two requests had.
        load_if_slower: Whether loads are made that cost more than recomputing.
        copy_cpus: Where copies run, ascending; None leaves it to ``default_placement``.
        copy_threads: Threads of one copy; None leaves it to ``CopyPlacement``.
    """

    world_size: int = 1
    host_memory_gib: float = 8
    chunk_tokens: int = 1024
    store_policy: StorePolicy = StorePolicy.SECOND_TOUCH
    state_policy: StatePolicy = StatePolicy.EXACT
    swap_on_preemption: bool = False
    hole_reuse: bool = True
    eviction: EvictionRule = EvictionRule.LATEST_USE
    blending: bool = False
    blend_head_tokens: int = 16
    blend_selector: Selector = Selector.HEADS
    blend_ratio: float = 0.10
    blend_run_tokens: int = 8
    blend_check_layer: int | None = None
    blend_min_tokens: int = 32
    blend_across_windows: bool = False
    segment_separator: str | tuple[int, ...] | None = None
    segment_sink: str | tuple[int, ...] | None = None
    learn_segments: bool = False
    load_if_slower: bool = False
    copy_cpus: tuple[int, ...] | None = None
    copy_threads: int | None = None

    @property
    def host_memory_bytes_per_worker(self) -> int:
        """Size of each worker's arena."""
        return int(self.host_memory_gib * _GIB) // self.world_size

    def refuse_unsuited_chunk(self, unit_tokens: int) -> None:
        """Refuse a chunk that ends inside a row.

        Args:
            unit_tokens: The layout's, see ``KVLayout.unit_tokens``.

        Raises:
            SettingsError: If a chunk is no multiple of the unit; the message names the nearest
                sizes that are.
        """
        rest = self.chunk_tokens % unit_tokens
        if not rest:
            return
        below = self.chunk_tokens - rest
        nearest = [str(size) for size in (below, below + unit_tokens) if size]
        raise _wrong(
            "chunk_tokens",
            self.chunk_tokens,
            f"a multiple of {unit_tokens}, the tokens of this model's row unit",
            f"The nearest: {' or '.join(nearest)}.",
        )


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table of options.

    Attributes:
        key: Of the configuration; the attribute of `ConnectorOptions` has the same name.
        parse: From the key and what the configuration has for it.
        doc: Its values and their effect, one paragraph of Markdown.
    """

    key: str
    parse: Callable[[str, Any], Any]
    doc: str

    @property
    def default(self) -> str:
        """What holds while the key is absent, as the configuration would have it."""
        value = getattr(ConnectorOptions(), self.key)
        if value is None:
            return "unset"
        if isinstance(value, enum.Enum):
            return str(value.value)
        return str(value).lower() if isinstance(value, bool) else str(value)


def parse_options(
    extra_config: Mapping[str, Any], world_size: int, environ: Mapping[str, str]
) -> ConnectorOptions:
    """Read and validate the configuration of a connector.

    A key whose value is null is absent.

    Args:
        extra_config: ``kv_connector_extra_config``.
        world_size: Workers of the engine.
        environ: Environment variables, of which an alias and `HOLE_REUSE_VARIABLE` are read.

    Raises:
        SettingsError: If a key is not in `OPTIONS`, or a value is wrong.
    """
    _refuse_unknown_keys(extra_config)
    values = {
        option.key: option.parse(option.key, extra_config[option.key])
        for option in OPTIONS
        if extra_config.get(option.key) is not None
    }
    if "state_policy" not in values:
        values["state_policy"] = _aliased_state_policy(environ)
    values.setdefault("hole_reuse", parse_reuses_holes(environ))
    options = ConnectorOptions(world_size=world_size, **values)
    if options.blending and not options.hole_reuse:
        raise _wrong(
            "blending",
            True,
            "hole_reuse, by which the tokens between segments are computed",
            "Set hole_reuse to true, or leave blending out.",
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
            nearest = difflib.get_close_matches(str(key), known, n=1)
            raise SettingsError(
                f"{CONFIG}: unknown key {key!r}: expected some of {', '.join(known)}."
                + (f" Did you mean {nearest[0]}?" if nearest else "")
                + " Correct or remove it."
            )


def _parse_gib(key: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MOST_GIB:
        raise _wrong(key, value, f"a number above 0, up to {_MOST_GIB}, without quotes")
    return float(value)


def _parse_positive_integer(key: str, value: Any) -> int:
    if not _is_integer(value) or value < 1:
        raise _wrong(key, value, "an integer of at least 1, without quotes")
    return int(value)


def _parse_natural_number(key: str, value: Any) -> int:
    if not _is_integer(value) or value < 0:
        raise _wrong(key, value, "an integer of at least 0, without quotes")
    return int(value)


def _parse_ratio(key: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise _wrong(key, value, "a number from 0 to 1, without quotes")
    return float(value)


def _parse_run_tokens(key: str, value: Any) -> int:
    if not _is_integer(value) or not 4 <= value <= 16:
        raise _wrong(key, value, "an integer from 4 to 16, without quotes")
    return int(value)


def _parse_token_ids(key: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(_is_integer(token) and token >= 0 for token in value):
        raise _wrong(key, value, "a list of token ids")
    return tuple(value)


def _parse_sink(key: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and not value:
        raise _wrong(key, value, "a text that is not empty, or a list of token ids")
    return value if isinstance(value, str) else _parse_token_ids(key, value)


def _parse_separator(key: str, value: Any) -> str | tuple[int, ...]:
    found = value if isinstance(value, str) else _parse_token_ids(key, value)
    if not found:
        raise _wrong(key, value, "a text, or a list of token ids, that is not empty")
    return found


def _parse_flag(key: str, value: Any) -> bool:
    # Strings come from command lines, where a value is quoted in JSON or it is not.
    flags = {"true": True, "false": False}
    found = flags.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise _wrong(key, value, "true or false")
    return found


def _parse_choice(choices: type[ChoiceT]) -> Callable[[str, Any], ChoiceT]:
    def parse(key: str, value: Any) -> ChoiceT:
        values = [choice.value for choice in choices]
        if value in values:
            return choices(value)
        nearest = difflib.get_close_matches(str(value), values, n=1)
        hint = f"Did you mean {nearest[0]}?" if nearest else ""
        raise _wrong(key, value, f"one of {', '.join(values)}", hint)

    return parse


def _parse_cpus(key: str, value: Any) -> tuple[int, ...]:
    cpus = _cpus_in_text(value) if isinstance(value, str) else _cpus_in_list(value)
    if not cpus:
        raise _wrong(
            key, value, 'numbers of CPUs, as a list such as [2, 3] or as a text such as "0-3,8"'
        )
    return tuple(sorted(cpus))


def _cpus_in_list(value: Any) -> set[int]:
    """Empty if something else is there."""
    is_list = isinstance(value, (list, tuple))
    return set(value) if is_list and all(_is_integer(cpu) and cpu >= 0 for cpu in value) else set()


def _cpus_in_text(text: str) -> set[int]:
    """Empty if something else is there."""
    cpus: set[int] = set()
    for part in text.split(","):
        found = _CPU_RANGE.fullmatch(part.strip())
        if found is None:
            return set()
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            return set()
        cpus.update(range(first, last + 1))
    return cpus


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _aliased_state_policy(environ: Mapping[str, str]) -> StatePolicy:
    text = environ.get(STATE_POLICY_ALIAS, "")
    value = text.strip().lower()
    if value and value not in _TRUTHS:
        raise SettingsError(
            f"{STATE_POLICY_ALIAS}={text!r} is not one of its values: expected "
            f"{', '.join(_TRUTHS)}. Correct or unset it, or set state_policy in {CONFIG}, which "
            "comes first."
        )
    return StatePolicy.SKIP if _TRUTHS.get(value, False) else StatePolicy.EXACT


OPTIONS = (
    Option(
        "host_memory_gib",
        _parse_gib,
        "Host memory of all workers of an engine together, in GiB. Each worker pins an equal part "
        "of it when the engine starts.",
    ),
    Option(
        "chunk_tokens",
        _parse_positive_integer,
        "Rows of full-attention groups are stored in chunks of so many tokens. A multiple of the "
        "model's row unit (128 for DeepSeek-V4): the engine refuses others when it starts, and "
        "names the nearest sizes. The default is rounded up to one. Whatever the chunk, prompts "
        "and answers are stored, and hit, up to the last row unit.",
    ),
    Option(
        "store_policy",
        _parse_choice(StorePolicy),
        "`second_touch`: stored is what ends of prompts and answers and other boundaries need "
        "that requests may resume from, and what a second request computes. `all`: everything that "
        "is computed. `never`: nothing.",
    ),
    Option(
        "state_policy",
        _parse_choice(StatePolicy),
        "`exact`: states (Mamba, compressors) are stored and loaded with the rest. `skip`: they "
        "are left out. That is lossy: what follows a loaded boundary is computed from other "
        f"states, and answers change. While the key is absent, `{STATE_POLICY_ALIAS}` is read: "
        "`true` or `1` is `skip`, `false` or `0` is `exact`.",
    ),
    Option(
        "swap_on_preemption",
        _parse_flag,
        "`true`: the KV of a request that is preempted goes to host memory and comes back, where "
        "that is cheaper than computing it again. `false`: it is computed again.",
    ),
    Option(
        "hole_reuse",
        _parse_flag,
        "`true`: where a chunk is missing, what is stored behind it is loaded all the same, and "
        "the missing tokens alone are computed. `false`: all behind it is computed. While the key "
        f"is absent, `{HOLE_REUSE_VARIABLE}` is read.",
    ),
    Option(
        "eviction",
        _parse_choice(EvictionRule),
        "What gives way when the host memory is full. `latest_use`: what was used longest ago; "
        "of one prompt, its end before its beginning. `reuse`: experimental, with `hole_reuse`: "
        "what is expected to bring the fewest hits for the time it stays, as learned from when "
        "chunks are asked for again.",
    ),
    Option(
        "blending",
        _parse_flag,
        "`true`: segments (documents whose KV was stored by themselves) are reused wherever they "
        "stand in a prompt, with their keys rotated to the new positions. **Approximate**: a "
        "reused token has not seen what stands before its segment, and answers change. See "
        "`docs/blending.md`.",
    ),
    Option(
        "blend_head_tokens",
        _parse_natural_number,
        "With `blending`: so many first tokens of each reused segment are computed, and segments "
        "shorter than twice that are computed whole. `0` reuses segments as they are.",
    ),
    Option(
        "blend_selector",
        _parse_choice(Selector),
        "With `blending`: which tokens of reused segments are computed. `heads`: the first "
        "`blend_head_tokens` of each. `question`: these, and behind them what the question attends "
        "to. What follows the last segment is computed once, at the price of one more step, only "
        "to find that out. On a CPU only, and only with `--enforce-eager`; elsewhere it is "
        "`heads`, and the log says why.",
    ),
    Option(
        "blend_ratio",
        _parse_ratio,
        "With `blend_selector=question`: this part of the tokens behind heads is computed, but no "
        "less than one run of each segment. `1.0` computes all of them.",
    ),
    Option(
        "blend_run_tokens",
        _parse_run_tokens,
        "With `blend_selector=question`: tokens are chosen in runs of so many, from 4 to 16.",
    ),
    Option(
        "blend_check_layer",
        _parse_natural_number,
        "With `blend_selector=question`: the layer at which the question is compared with the "
        "segments, counted from 0 in the order of the model, among those with pages of their own. "
        "It must have full attention. `python -m vllm_ascend_kvext check-layer MODEL` finds it. "
        "Unset: the one next to three fifths of the model.",
    ),
    Option(
        "blend_min_tokens",
        _parse_positive_integer,
        "With `blending`: where fewer tokens of a segment could be reused, they are computed.",
    ),
    Option(
        "blend_across_windows",
        _parse_flag,
        "With `blending`, where a model has sliding windows. `false`: the first tokens of a reused "
        "segment are computed for as long as a window still reaches across its beginning. `true`: "
        "only `blend_head_tokens` are.",
    ),
    Option(
        "segment_separator",
        _parse_separator,
        "With `blending`: what stands between two of these separators in a prompt is a segment, "
        "where a request names none. A text, which is tokenized once, without special tokens, or "
        "a list of token ids. Unset: only segments that a request names are reused.",
    ),
    Option(
        "segment_sink",
        _parse_sink,
        "With `blending`: what segments are computed behind. A text, which is tokenized once, "
        "without special tokens, and follows the model's token for the beginning of a sequence, if "
        "it has one; or a list of token ids. Unset: that token alone; `[]` is nothing. With a few "
        "hundred tokens of text, answers came nearer to those without reuse; see "
        "`docs/blending.md`.",
    ),
    Option(
        "learn_segments",
        _parse_flag,
        "With `blending`. `true`: a segment that two requests had, and that no client has stored, "
        "is computed by itself and stored while no request waits to be admitted. `false`: only "
        "clients store segments.",
    ),
    Option(
        "load_if_slower",
        _parse_flag,
        "`true`: loads are made even where they are estimated to take longer than computing the "
        "same tokens. `false`: such loads are left out, logged and counted.",
    ),
    Option(
        "copy_cpus",
        _parse_cpus,
        'The CPUs that copies run on: a list such as `[2, 3]`, or a text such as `"0-3,8"`. '
        "Unset: CPUs of the process that the model does not run on.",
    ),
    Option(
        "copy_threads",
        _parse_positive_integer,
        "Threads of one copy. Unset: as many as it has CPUs, four at most.",
    ),
)
"""Every key, in the order of the page of settings."""
