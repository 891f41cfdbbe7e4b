# SPDX-License-Identifier: Apache-2.0
"""One transfer per plane instead of one for all: for comparison, and to find a plane at fault."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.schema import PlaneColumn, RunColumn


def explode(transfer: Transfer) -> Iterator[Transfer]:
    """Transfers of one plane each that together do the same.

    The transfer must have been found valid: overlaps between planes cannot be seen in the parts.
    """
    groups = transfer.runs[:, RunColumn.GROUP]
    for index, group in enumerate(transfer.planes[:, PlaneColumn.GROUP]):
        first, last = np.searchsorted(groups, (group, group + 1))
        if first < last:
            yield transfer._replace(
                planes=transfer.planes[index : index + 1],
                runs=transfer.runs[first:last],
            )
