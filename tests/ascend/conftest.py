# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What only vLLM-Ascend has, on its real platform patches: see ``support.family``."""

from __future__ import annotations

from support import family

collect_ignore_glob = [] if family.IS_ASCEND else ["test_*.py"]
