// SPDX-License-Identifier: Apache-2.0
// Threads that sleep between jobs, each team on CPUs of its own, and how a transfer is divided between
// them. They start on first use, and again in a forked child.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kvext/page_transfer.h"

namespace kvext {

// Runs task(0) ... task(num_tasks - 1), each once, on at most num_threads threads, and returns when
// all have ended. The caller is one of them where it may only run on the placement's CPUs, and where
// the machine gives no threads: that costs speed only. Tasks must not throw.
//
// Throws PlacementError, before any task runs.
void run_tasks(const Placement& placement, int num_threads, int64_t num_tasks,
               const std::function<void(int64_t)>& task);

// Bytes per thread, at least: a thread that takes fewer costs more to wake than it saves.
constexpr int64_t kMinBytesPerThread = 256 * 1024;
// Bytes of the smallest job that is handed to threads. The caller copies fewer, wherever it runs, in
// the time that waking a thread takes.
constexpr int64_t kMinHandedOverBytes = 64 * 1024;
// Tasks per thread: a thread that is late leaves its share to the others.
constexpr int64_t kTasksPerThread = 4;

// Calls work(begin, end) for parts of [0, num_bytes), together all of it.
template <typename Work>
void split_by_bytes(int64_t num_bytes, const CopyOptions& options, Work&& work) {
  if (num_bytes < kMinHandedOverBytes) {
    work(int64_t{0}, num_bytes);
    return;
  }
  const int64_t num_useful = std::min<int64_t>(
      options.num_threads, std::max<int64_t>(num_bytes / kMinBytesPerThread, 1));
  const int64_t num_tasks = num_useful == 1 ? 1 : num_useful * kTasksPerThread;
  // A task has whole lines, so that no two tasks write one.
  const int64_t task_bytes = (num_bytes / num_tasks / 64 + 1) * 64;
  run_tasks(options.placement, static_cast<int>(num_useful), num_tasks, [&](int64_t index) {
    const int64_t begin = std::min(index * task_bytes, num_bytes);
    work(begin, std::min(begin + task_bytes, num_bytes));
  });
}

}  // namespace kvext
