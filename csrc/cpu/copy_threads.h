// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Threads that sleep between jobs, one team per placement, and the division of a transfer between
// them. The threads start on first use, and again in a forked child.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kvext/page_transfer.h"

namespace kvext {

// Runs task(0) ... task(num_tasks - 1), each once, on at most num_threads threads, and returns when
// all tasks have ended. The caller runs tasks, too, if it may run only on the placement's CPUs, or
// if no thread can be started. Without threads, only speed is lost. Tasks must not throw.
//
// Throws PlacementError, before any task runs.
void run_tasks(const Placement& placement, int num_threads, int64_t num_tasks,
               const std::function<void(int64_t)>& task);

// Minimum of bytes per thread. Waking a thread for fewer bytes costs more than it saves.
constexpr int64_t kMinBytesPerThread = 256 * 1024;
// Bytes of the smallest job that is handed to threads. A smaller job is done by the caller on any
// CPU, because waking a thread takes as long.
constexpr int64_t kMinHandedOverBytes = 64 * 1024;
// Tasks per thread: if a thread is late, the other threads run its tasks.
constexpr int64_t kTasksPerThread = 4;

// Calls work(begin, end) for parts of [0, num_bytes) that together cover it.
template <typename Work>
void split_by_bytes(int64_t num_bytes, const CopyOptions& options, Work&& work) {
  if (num_bytes < kMinHandedOverBytes) {
    work(int64_t{0}, num_bytes);
    return;
  }
  const int64_t num_useful = std::min<int64_t>(
      options.num_threads, std::max<int64_t>(num_bytes / kMinBytesPerThread, 1));
  const int64_t num_tasks = num_useful == 1 ? 1 : num_useful * kTasksPerThread;
  // A task has whole cache lines, so that no two tasks write the same line.
  const int64_t task_bytes = (num_bytes / num_tasks / 64 + 1) * 64;
  run_tasks(options.placement, static_cast<int>(num_useful), num_tasks, [&](int64_t index) {
    const int64_t begin = std::min(index * task_bytes, num_bytes);
    work(begin, std::min(begin + task_bytes, num_bytes));
  });
}

}  // namespace kvext
