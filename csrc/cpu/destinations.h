// SPDX-License-Identifier: Apache-2.0
// Whether a transfer writes a byte twice.
#pragma once

#include "kvext/checked_transfer.h"

namespace kvext {

// Both expect a transfer whose ranges have been found valid, and throw DescriptorError.
void refuse_host_rows_written_twice(const CheckedTransfer& checked);
void refuse_pool_bytes_written_twice(const CheckedTransfer& checked);

}  // namespace kvext
