# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Sections of a long check: their time limits, what is kept of them, and their report."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from gpu.sections import LEFT_OUT, OK, WRONG, Report, Row, Rows, Section, run_all, run_section
from support.scenarios.answers import Answer
from support.scenarios.taught import taught_error

WRITES = """
import sys
sys.path.append({tests!r})
from gpu.sections import Rows
from pathlib import Path
rows = Rows(Path(sys.argv[-1]))
"""
TESTS = str(Path(__file__).parents[2])


def section(name: str, code: str, max_s: float = 20.0, stage: int = 0) -> Section:
    program = WRITES.format(tests=TESTS) + code
    return Section(name, [sys.executable, "-c", program], max_s, stage)


def test_a_section_that_is_cut_off_loses_no_row_and_leaves_no_process(tmp_path: Path) -> None:
    code = """
import os, subprocess, time
rows.check("the first", True, "1 of 1", number=7)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
rows.add("child", "measured", str(child.pid))
with rows.path.open("a") as file:
    file.write('{"what": "half a ro')
time.sleep(1000)
"""
    began_s = time.monotonic()
    # The limit leaves a busy machine time to start the process.
    ended = run_section(section("a, b", code, 5.0), tmp_path, 100.0)
    assert time.monotonic() - began_s < 60
    assert ended.how.startswith("cut off after") and not ended.is_good
    assert [row.what for row in ended.rows] == ["the first", "child"]
    assert ended.rows[0] == Row("the first", OK, "1 of 1", {"number": 7})
    assert not _is_alive(int(ended.rows[1].found))


def _is_alive(process_id: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("code", "how", "is_good"),
    [
        ("rows.check('it', True)", "ended", True),
        ("rows.check('it', False)", "ended", False),
        ("rows.check('it', True); raise SystemExit(3)", "failed with exit code 3", False),
        ("rows.check('it', True); print('the cause'); 1 / 0", "failed with exit code 1", False),
    ],
)
def test_a_section_is_good_if_it_ended_and_nothing_is_wrong(
    code: str, how: str, is_good: bool, tmp_path: Path
) -> None:
    ended = run_section(section("it", code), tmp_path, 100.0)
    assert (ended.how, ended.is_good) == (how, is_good)
    assert ("the cause" in ended.log_tail) is ("the cause" in code)


def test_rows_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    one = section("it", "rows.check('old', True)")
    run_section(one, tmp_path, 100.0)
    ended = run_section(section("it", "rows.check('new', True)"), tmp_path, 100.0)
    assert [row.what for row in ended.rows] == ["new"]


def test_stages_follow_each_other_and_what_has_no_time_is_reported(tmp_path: Path) -> None:
    meets = """
import time
Path({mine!r}).touch()
while not Path({other!r}).exists():
    time.sleep(0.01)
rows.check("met", True)
"""
    paths = [str(tmp_path / name) for name in ("x", "y")]
    report = Report(tmp_path, "A title", {"device": "a | b"})
    sections = [
        section("last", "pass", stage=2),
        section("one", meets.format(mine=paths[0], other=paths[1])),
        section("other", meets.format(mine=paths[1], other=paths[0])),
        section("slow", "import time; time.sleep(1000)", 1000.0, stage=1),
    ]
    run_all(sections, report, tmp_path, 8.0)
    found = {each.section.name: each.how.split(" after")[0] for each in report.ended}
    assert list(found)[2:] == ["slow", "last"]
    assert found == {
        "one": "ended",
        "other": "ended",
        "slow": "cut off",
        "last": "not started: no time was left",
    }
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# A title\n") and "| device | a \\| b |" in text
    assert "**Not all is right: slow, last.**" in text
    data = json.loads((tmp_path / "report.json").read_text())
    assert [each["how"] for each in data["sections"]] == [each.how for each in report.ended]


def test_the_report_is_written_while_sections_run(tmp_path: Path) -> None:
    """A check that is killed has reported what had ended before."""
    report = Report(tmp_path, "A title", {})
    code = f"""
import time
while "the claim" not in Path({str(tmp_path)!r}, "report.md").read_text():
    time.sleep(0.01)
"""
    report.write()
    run_all(
        [section("first", "rows.add('the claim', 'WRONG', 'a\\nb')"), section("second", code)],
        report,
        tmp_path,
        100.0,
    )
    assert {each.section.name: each.how for each in report.ended}["second"] == "ended"
    assert "| the claim | WRONG | a b |" in (tmp_path / "report.md").read_text()


def test_outcomes_are_counted(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")
    rows.check("a", True)
    rows.check("b", False)
    rows.add("c", LEFT_OUT)
    assert [row.outcome for row in rows.read()] == [OK, WRONG, LEFT_OUT]


# What the reference says of a reply.

STEPS = [{"7": -0.1, "8": -3.0, "9": -4.0}, {"8": -0.5, "7": -0.9, "6": -2.0}]


def answer(*steps: dict[str, float], reply: tuple[int, ...] = (7, 8)) -> Answer:
    return Answer(3, 0, list(reply), list(steps), (1, 2, 3))


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (answer({"7": -0.1, "8": -3.0}, {"8": -0.5, "7": -0.9}), 0.0),
        (answer({"7": -0.1, "8": -3.2}, {"8": -0.5, "7": -0.8}), 0.2),
        # Another token than the best: as wrong as it is worse.
        (answer({"7": -0.1}, {"7": -0.9}, reply=(7, 7)), 0.4),
        # A token that the reference does not name has at most its lowest log-probability.
        (answer({"7": -0.1, "5": -1.0}, {"8": -0.5}), 3.0),
        (answer({"7": float("nan")}, {"8": -0.5}), float("inf")),
    ],
)
def test_every_step_of_a_reply_is_compared(reply: Answer, error: float) -> None:
    assert taught_error(reply, STEPS) == pytest.approx(error)


def test_a_missing_step_is_no_agreement() -> None:
    with pytest.raises(ValueError, match="expected 2 steps, found 1"):
        taught_error(answer({"7": -0.1}, {"8": -0.5}), STEPS[:1])


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="it looks at processes there")
def test_ended_processes_are_seen() -> None:
    assert not _is_alive(2**22 - 1)
