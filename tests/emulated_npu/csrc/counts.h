// SPDX-License-Identifier: Apache-2.0
// How often each operator was called, for tables and for tests of what a run covers.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace emulated_npu {

void count_operator(const std::string& name);
void count_operators(bool is_counting);
std::map<std::string, int64_t> operator_counts();

}  // namespace emulated_npu
