// SPDX-License-Identifier: Apache-2.0
#include "counts.h"

#include <atomic>
#include <mutex>

namespace emulated_npu {
namespace {

std::atomic<bool> counts_now{false};
std::mutex mutex;
std::map<std::string, int64_t> counts;

}  // namespace

void count_operator(const std::string& name) {
  if (!counts_now) return;
  std::lock_guard lock(mutex);
  ++counts[name];
}

void count_operators(bool is_counting) { counts_now = is_counting; }

std::map<std::string, int64_t> operator_counts() {
  std::lock_guard lock(mutex);
  return counts;
}

}  // namespace emulated_npu
