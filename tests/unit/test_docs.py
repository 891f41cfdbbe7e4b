# SPDX-License-Identifier: Apache-2.0
"""The pages for readers: the generated ones are up to date, links lead somewhere, and the
README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_ascend_kvext.commands import ledger, settings
from vllm_ascend_kvext.connector.counters import METRICS
from vllm_ascend_kvext.connector.options import OPTIONS
from vllm_ascend_kvext.features import FEATURES, REPAIRS
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import HOW_TO_ASK, VARIABLES

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/*.md")])

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_the_page_of_patches_is_what_the_ledger_prints() -> None:
    page = (CHECKOUT / "docs" / "patches.md").read_text(encoding="utf-8")
    assert page == ledger.render(FEATURES, PATCHES, FingerprintStore.load()) + "\n", "`make docs`"


def test_the_page_of_settings_is_what_the_command_prints() -> None:
    page = (CHECKOUT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings.render(VARIABLES, OPTIONS) + "\n", "`make docs`"


def test_the_readme_has_at_most_150_lines() -> None:
    lines = (CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150


def test_the_readme_names_every_repair() -> None:
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{repair.name}`" in text for repair in REPAIRS)


@every_page
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@every_page
def test_every_variable_that_a_page_names_exists(page: Path) -> None:
    known = {variable.name for variable in VARIABLES}
    names = re.findall(r"VLLM_ASCEND_KVEXT_[A-Z_]+[A-Z]", page.read_text(encoding="utf-8"))
    assert set(names) <= known


def test_there_is_a_way_to_ask_for_every_feature_that_is_off() -> None:
    assert set(HOW_TO_ASK) == {feature.name for feature in FEATURES if not feature.default_on}


def test_the_page_of_metrics_names_every_metric_and_label_of_the_connector() -> None:
    page = (CHECKOUT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for metric in METRICS:
        suffix = "" if metric.is_gauge else "_total"
        label = f"{{{metric.label}=…}}" if metric.label else ""
        assert f"`vllm:kvext_{metric.name}{suffix}{label}`" in page
        assert all(f"`{value}`" in page for value in metric.label_values), metric.name
