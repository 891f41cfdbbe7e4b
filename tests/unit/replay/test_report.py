# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What a replay prints: the table, the picture, the bar, and which variants there are."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vllm_ascend_kvext.replay.plays import play_all
from vllm_ascend_kvext.replay.progress import ProgressBar
from vllm_ascend_kvext.replay.report import draw_picture, render_table
from vllm_ascend_kvext.replay.variants import (
    Variant,
    VariantResult,
    list_variants,
    set_environment,
)
from vllm_ascend_kvext.settings import Retention

DENSE = VariantResult("dense caching", 2, 1000, 200, 800, 800, waited_s=1.25)
HOST = VariantResult("adaptive + host 4 GiB", 2, 1000, 600, 810, 400, 3, host_bytes=3 << 30)
REFUSED = VariantResult("vLLM, interval 5", refusal="not a <multiple>")


def test_each_variant_is_a_line_and_the_endless_cache_the_last() -> None:
    head, dense, host, refused, endless = render_table([DENSE, HOST, REFUSED])
    assert "20.0%" in dense and dense.count("█") == 5 and "1.2 s" in dense
    assert "60.0%" in host and host.count("█") == 15 and host.endswith("3.0 GiB")
    assert refused.endswith("refused: not a <multiple>")
    assert endless.startswith("endless cache") and "81.0%" in endless
    assert "computed" in head and " 800 " in dense
    large = VariantResult("large", 2, 1000, 200, 800, 81_234_567, host_bytes=3 << 20)
    assert "81.23 M" in render_table([large])[1] and "3.0 MiB" in render_table([large])[1]


def test_the_picture_has_a_bar_for_each_result() -> None:
    root = ElementTree.fromstring(draw_picture([DENSE, HOST, REFUSED], "a <log> & more"))
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert texts[0] == "a <log> & more"
    assert texts[1::2] == ["dense caching", "adaptive + host 4 GiB", "endless cache"]
    assert texts[2::2] == ["20.0%", "60.0%", "81.0%"]
    widths = [float(each.attrib["width"]) for each in root.iter() if each.tag.endswith("rect")][1:]
    assert [round(width / widths[0], 2) for width in widths] == [1, 3, 4.05]


def test_a_model_with_windows_is_played_in_every_variant() -> None:
    variants = list_variants(True, 256, (0, 100, 4096), (2.0, 8.0, 32.0))
    assert [variant.name for variant in variants] == [
        "dense caching",
        "vLLM, interval 0",
        "vLLM, interval 256",
        "vLLM, interval 4,096",
        "adaptive retention",
        "adaptive + host 2 GiB",
        "adaptive + host 8 GiB",
        "adaptive + host 32 GiB",
        "adaptive + host 8 GiB + shared",
        "adaptive + host 8 GiB + shared, all",
    ]
    assert [variant.interval_tokens for variant in variants[:4]] == [None, 0, 256, 4096]
    assert [variant.needs_package for variant in variants] == [False] * 4 + [True] * 6
    assert [variant.host_gib for variant in variants[4:]] == [0.0, 2.0, 8.0, 32.0, 8.0, 8.0]
    assert [variant.is_shared for variant in variants] == [False] * 8 + [True] * 2
    assert [variant.stores_all for variant in variants] == [False] * 9 + [True]


def test_retention_is_not_played_where_it_has_nothing_to_choose() -> None:
    variants = list_variants(False, 16, (0, 4096), (8.0,))
    assert [variant.name for variant in variants] == [
        "dense caching",
        "dense + host 8 GiB",
        "dense + host 8 GiB + shared",
        "dense + host 8 GiB + shared, all",
    ]
    assert {variant.policy for variant in variants} == {None}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (Variant("dense"), {"VLLM_ASCEND_KVEXT_MODE": "off"}),
        (
            Variant("stock", None, 0),
            {"VLLM_ASCEND_KVEXT_MODE": "off", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": "0"},
        ),
        (
            Variant("adaptive", Retention.ADAPTIVE),
            {"VLLM_ASCEND_KVEXT_MODE": "safe", "VLLM_ASCEND_KVEXT_RETENTION": "adaptive"},
        ),
        (Variant("host", host_gib=1.0), {"VLLM_ASCEND_KVEXT_MODE": "safe"}),
    ],
)
def test_the_environment_is_that_of_the_variant_alone(
    variant: Variant, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("VLLM_ASCEND_KVEXT_RETENTION", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL")
    monkeypatch.setenv("VLLM_ASCEND_KVEXT_MODE", "off")
    for name in own:
        monkeypatch.setenv(name, "77")
    set_environment(variant)
    found = {name: os.environ.get(name) for name in ("VLLM_ASCEND_KVEXT_MODE", *own)}
    assert {name: value for name, value in found.items() if value is not None} == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_says_how_much_is_left_and_is_not_shown_too_often() -> None:
    now_s = 0.0
    stream = Terminal()
    bar = ProgressBar(200, "requests", stream, lambda: now_s)
    bar.show(1)
    assert stream.getvalue() == ""
    now_s = 30.0
    bar.show(50)
    bar.show(51)
    assert stream.getvalue().count("\r") == 1
    assert "25% 50/200 requests, 1 min 30 s left" in stream.getvalue()
    bar.show(200)
    assert stream.getvalue().rstrip().endswith("100% 200/200 requests")
    bar.clear()
    assert stream.getvalue().endswith("\r")


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    now_s = 0.0
    stream = io.StringIO()
    bar = ProgressBar(4, "requests", stream, lambda: now_s)
    for done in range(1, 5):
        now_s += 6.0
        bar.show(done)
    bar.clear()
    assert [line.rpartition("] ")[2] for line in stream.getvalue().splitlines()] == [
        " 50% 2/4 requests, 12 s left",
        "100% 4/4 requests",
    ]


def play_one(variant: Variant, on_progress: object) -> VariantResult:
    assert callable(on_progress)
    if variant.name == "killed":
        os._exit(9)
    if variant.name == "wrong":
        raise ValueError("expected a multiple\nand more")
    on_progress(3)
    on_progress(7)
    return VariantResult(variant.name, num_requests=os.getpid())


def test_each_variant_has_a_process_of_its_own_and_an_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    shown: list[int] = []
    names = ("one", "killed", "two", "wrong", "three")
    results = {
        result.name: result
        for result in play_all([Variant(name) for name in names], play_one, 2, shown.append)
    }
    assert set(results) == set(names)
    assert results["killed"].refusal == "its process ended with status 9 without a result"
    assert results["wrong"].refusal == "expected a multiple"
    pids = {results[name].num_requests for name in ("one", "two", "three")}
    assert len(pids) == 3 and os.getpid() not in pids
    assert shown == sorted(shown) and shown[-1] == 21


def test_plays_end_with_the_command() -> None:
    def forever(variant: Variant, on_progress: object) -> VariantResult:
        import time

        assert callable(on_progress)
        on_progress(1)
        if variant.name == "slow":
            time.sleep(60)
        return VariantResult(variant.name)

    plays = play_all([Variant("slow"), Variant("fast")], forever, 2, lambda _: None)
    assert next(plays).name == "fast"
    plays.close()  # Waits for the end of the process that it has ended.


def test_plays_end_when_the_command_is_killed(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
sys.path[:] = {sys.path!r}
from vllm_ascend_kvext.replay.plays import play_all
from vllm_ascend_kvext.replay.variants import Variant

def forever(variant, on_progress):
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.01)
        on_progress(1)

list(play_all([Variant("endless")], forever, 1, lambda _: None))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as found:
        assert found.stdout is not None
        assert found.stdout.readline()
        found.kill()
        # The pipe ends when no process writes to it any more.
        assert found.stdout.read() == ""
