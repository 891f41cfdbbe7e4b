// SPDX-License-Identifier: Apache-2.0
// Whether a transfer writes a byte twice.
#pragma once

#include "kvext/plan.h"

namespace kvext {

// Both expect ranges that have been found valid, and throw DescriptorError.
void refuse_host_rows_written_twice(const Transfer& transfer, const std::vector<Group>& groups);
void refuse_pool_bytes_written_twice(const Transfer& transfer, const std::vector<Group>& groups);

}  // namespace kvext
