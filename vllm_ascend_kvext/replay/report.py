# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The table and the picture of a replay. The module imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vllm_ascend_kvext.replay.variants import VariantResult

ENDLESS = "endless cache"
_GIB = 1 << 30
_MIB = 1 << 20
_BAR_CELLS = 25
_ROW_PIXELS = 26
_NAME_PIXELS = 260
_BAR_PIXELS = 460
_COLOURS = {"vLLM": "#8d99ae", "package": "#2a9d8f", "endless": "#e9c46a"}


def endless_rate(results: Sequence[VariantResult]) -> float:
    """The hit rate of an endless cache. It depends a little on the order of requests."""
    return max((result.endless_rate for result in results), default=0.0)


def render_table(results: Sequence[VariantResult]) -> list[str]:
    """One line for each variant, with a bar. The last line is the endless cache."""
    names = [result.name for result in results]
    width = max(map(len, [*names, ENDLESS]))
    lines = [
        f"{'':{width}}  {'hit':>6}  {'':{_BAR_CELLS}}  {'computed':>10} {'preempted':>9} "
        f"{'waited':>8} {'host':>9}"
    ]
    for result in results:
        if result.refusal:
            lines.append(f"{result.name:{width}}  refused: {result.refusal}")
            continue
        held = _size(result.host_bytes) if result.host_bytes else ""
        lines.append(
            f"{result.name:{width}}  {result.hit_rate:6.1%}  {_bar(result.hit_rate)}  "
            f"{_tokens(result.computed_tokens):>10} {result.num_preemptions:>9,} "
            f"{result.waited_s:>6.1f} s {held:>9}".rstrip()
        )
    rate = endless_rate(results)
    return [*lines, f"{ENDLESS:{width}}  {rate:6.1%}  {_bar(rate)}".rstrip()]


def draw_picture(results: Sequence[VariantResult], title: str) -> str:
    """The hit rates as an SVG picture, one bar for each variant."""
    shown = [result for result in results if not result.refusal]
    bars = [(each.name, each.hit_rate, "vLLM" if _is_vllm(each) else "package") for each in shown]
    bars.append((ENDLESS, endless_rate(shown), "endless"))
    width = _NAME_PIXELS + _BAR_PIXELS + 80
    height = 50 + _ROW_PIXELS * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for row, (name, rate, colour) in enumerate(bars):
        top = 40 + row * _ROW_PIXELS
        bar = round(rate * _BAR_PIXELS, 1)
        parts += [
            f'<text x="{_NAME_PIXELS - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_NAME_PIXELS}" y="{top + 2}" width="{bar}" height="{_ROW_PIXELS - 8}" '
            f'fill="{_COLOURS[colour]}"/>',
            f'<text x="{_NAME_PIXELS + bar + 6}" y="{top + 15}">{rate:.1%}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _is_vllm(result: VariantResult) -> bool:
    return result.name.startswith(("dense caching", "vLLM"))


def _bar(rate: float) -> str:
    filled = round(rate * _BAR_CELLS)
    return "█" * filled + "·" * (_BAR_CELLS - filled)


def _tokens(number: int) -> str:
    return f"{number / 1e6:,.2f} M" if number >= 1_000_000 else f"{number:,}"


def _size(num_bytes: int) -> str:
    is_large = num_bytes >= _GIB
    return f"{num_bytes / _GIB:,.1f} GiB" if is_large else f"{num_bytes / _MIB:,.1f} MiB"
