// SPDX-License-Identifier: Apache-2.0
// Threads that sleep between jobs, each team on CPUs of its own. They start on first use, and again
// in a forked child.
#pragma once

#include <cstdint>
#include <functional>

#include "kvext/placement.h"

namespace kvext {

// Runs task(0) ... task(num_tasks - 1), each once, on at most num_threads threads, and returns when
// all have ended. The caller is one of them where it may only run on the placement's CPUs, and where
// the machine gives no threads: that costs speed only. Tasks must not throw.
//
// Throws PlacementError, before any task runs.
void run_tasks(const Placement& placement, int num_threads, int64_t num_tasks,
               const std::function<void(int64_t)>& task);

// Whether the calling thread may only run where the placement says.
bool is_caller_placed(const Placement& placement);

}  // namespace kvext
