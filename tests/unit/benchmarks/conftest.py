# SPDX-License-Identifier: Apache-2.0
"""Makes ``benchmarks/`` importable; no test here needs vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
