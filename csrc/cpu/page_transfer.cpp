// SPDX-License-Identifier: Apache-2.0
#include "kvext/page_transfer.h"

#include <algorithm>
#include <cstring>

#include "copier.h"
#include "copy_kernels.h"
#include "copy_threads.h"
#include "kvext/copies.h"

namespace kvext {
namespace {

// A thread that takes fewer bytes than this costs more to wake than it saves.
constexpr int64_t kLeastBytesPerThread = 256 * 1024;
// Fewer are copied by the caller, wherever it runs: in the time that waking a thread takes.
constexpr int64_t kLeastHandedOverBytes = 64 * 1024;
// Several tasks per thread, so that one that is late leaves its share to the others.
constexpr int64_t kTasksPerThread = 4;

// Calls work(begin, end) for parts of [0, num_bytes), together all of it.
template <typename Work>
void split_by_bytes(int64_t num_bytes, const CopyOptions& options, Work&& work) {
  if (num_bytes < kLeastHandedOverBytes) {
    work(int64_t{0}, num_bytes);
    return;
  }
  const int64_t num_useful = std::min<int64_t>(
      options.num_threads, std::max<int64_t>(num_bytes / kLeastBytesPerThread, 1));
  const int64_t num_tasks = num_useful == 1 ? 1 : num_useful * kTasksPerThread;
  // Whole lines, so that no two tasks write one.
  const int64_t task_bytes = (num_bytes / num_tasks / 64 + 1) * 64;
  run_tasks(options.placement, static_cast<int>(num_useful), num_tasks, [&](int64_t index) {
    const int64_t begin = std::min(index * task_bytes, num_bytes);
    work(begin, std::min(begin + task_bytes, num_bytes));
  });
}

}  // namespace

void page_transfer(const CheckedTransfer& checked, const CopyOptions& options) {
  const bool is_streaming = streams(checked.num_bytes(), options.streaming);
  split_by_bytes(checked.num_bytes(), options, [&](int64_t begin, int64_t end) {
    for_each_copy(checked, begin, end, Copier(is_streaming));
  });
}

void copy(void* destination, const void* source, int64_t num_bytes, const CopyOptions& options) {
  const bool is_streaming = streams(num_bytes, options.streaming);
  const CopyKernel& kernel = copy_kernels().front();
  auto* const to = static_cast<uint8_t*>(destination);
  const auto* const from = static_cast<const uint8_t*>(source);
  split_by_bytes(num_bytes, options, [&](int64_t begin, int64_t end) {
    const auto part_bytes = static_cast<size_t>(end - begin);
    if (is_streaming) {
      kernel.stream(to + begin, from + begin, part_bytes);
      kernel.fence();
    } else {
      std::memcpy(to + begin, from + begin, part_bytes);
    }
  });
}

Description describe() {
  Description description;
  for (const CopyKernel& kernel : copy_kernels()) {
    description.instruction_sets.push_back(kernel.name);
  }
  description.kernel = copy_kernels().front().name;
  return description;
}

}  // namespace kvext
