// SPDX-License-Identifier: Apache-2.0
// A few threads that sleep between jobs. They start on first use, and again in a forked child.
#pragma once

#include <cstdint>
#include <functional>

namespace kvext {

// Runs task(0) ... task(num_tasks - 1), each once, on the caller and up to num_threads - 1 others,
// and returns when all have ended. The caller takes tasks like any other thread, so that a busy
// machine, or one that gives no more threads, costs speed only. Tasks must not throw.
void run_tasks(int num_threads, int64_t num_tasks, const std::function<void(int64_t)>& task);

}  // namespace kvext
