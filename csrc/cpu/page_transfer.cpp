// SPDX-License-Identifier: Apache-2.0
#include "kvext/page_transfer.h"

#include <algorithm>

#include "copy_kernels.h"
#include "kvext/copies.h"
#include "thread_pool.h"

namespace kvext {
namespace {

// A thread that takes fewer bytes than this costs more to wake than it saves.
constexpr int64_t kLeastBytesPerThread = 256 * 1024;
// Several tasks per thread, so that one that is late leaves its share to the others.
constexpr int64_t kTasksPerThread = 4;
// Shorter copies are done by plain stores: their ends would fill lines in part.
constexpr int64_t kLeastStreamedCopyBytes = 1024;
// Transfers smaller than this may be read again from the cache.
constexpr int64_t kLeastStreamedBytes = 1024 * 1024;

bool streams(int64_t num_bytes, Streaming streaming) {
  return streaming == Streaming::kAuto ? num_bytes >= kLeastStreamedBytes
                                       : streaming == Streaming::kOn;
}

class Copier {
 public:
  explicit Copier(bool is_streaming)
      : kernel_(copy_kernels().front()),
        least_streamed_bytes_(is_streaming ? kLeastStreamedCopyBytes : INT64_MAX) {}
  ~Copier() { kernel_.fence(); }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  void operator()(const Copy& copy) const {
    auto* const destination = reinterpret_cast<uint8_t*>(copy.destination);
    const auto* const source = reinterpret_cast<const uint8_t*>(copy.source);
    const auto num_bytes = static_cast<size_t>(copy.num_bytes);
    if (num_bytes <= 64) {
      copy_up_to_64(destination, source, num_bytes);
    } else if (copy.num_bytes < least_streamed_bytes_) {
      std::memcpy(destination, source, num_bytes);
    } else {
      kernel_.stream(destination, source, num_bytes);
    }
  }

 private:
  const CopyKernel& kernel_;
  const int64_t least_streamed_bytes_;
};

// Calls work(begin, end) for parts of [0, num_bytes), together all of it.
template <typename Work>
void split_by_bytes(int64_t num_bytes, int num_threads, Work&& work) {
  const int64_t num_useful =
      std::min<int64_t>(num_threads, std::max<int64_t>(num_bytes / kLeastBytesPerThread, 1));
  if (num_useful == 1) {
    work(int64_t{0}, num_bytes);
    return;
  }
  const int64_t num_tasks = num_useful * kTasksPerThread;
  // Whole lines, so that no two tasks write one.
  const int64_t task_bytes = (num_bytes / num_tasks / 64 + 1) * 64;
  run_tasks(static_cast<int>(num_useful), num_tasks, [&](int64_t index) {
    const int64_t begin = std::min(index * task_bytes, num_bytes);
    work(begin, std::min(begin + task_bytes, num_bytes));
  });
}

}  // namespace

void page_transfer(const Plan& plan, int num_threads, Streaming streaming) {
  const bool is_streaming = streams(plan.num_bytes(), streaming);
  split_by_bytes(plan.num_bytes(), num_threads, [&](int64_t begin, int64_t end) {
    for_each_copy(plan, begin, end, Copier(is_streaming));
  });
}

void copy(void* destination, const void* source, int64_t num_bytes, int num_threads,
          Streaming streaming) {
  const bool is_streaming = streams(num_bytes, streaming);
  const auto to = reinterpret_cast<int64_t>(destination);
  const auto from = reinterpret_cast<int64_t>(source);
  split_by_bytes(num_bytes, num_threads, [&](int64_t begin, int64_t end) {
    const Copier copier(is_streaming);
    if (begin < end) copier(Copy{from + begin, to + begin, end - begin});
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
