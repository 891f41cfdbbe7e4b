// SPDX-License-Identifier: Apache-2.0
// One launch on a host: its cores, one after the other. Results must not depend on which core is
// first, so that is the caller's to choose.
#pragma once

#include <cstdint>
#include <memory>

#include "memory.h"

namespace kvext_shim {

// Throws Violation.
template <typename Kernel>
void RunCores(GlobalMemory& memory, uint32_t num_cores, bool is_last_core_first, Kernel kernel) {
  struct Leave {
    ~Leave() { current_core = nullptr; }
  } leave;
  for (uint32_t turn = 0; turn < num_cores; ++turn) {
    const auto core = std::make_unique<Core>();
    core->memory = &memory;
    core->index = is_last_core_first ? num_cores - 1 - turn : turn;
    core->num_cores = num_cores;
    current_core = core.get();
    kernel();
    for (const Buffer& buffer : core->buffers) {
      if (buffer.stage != Stage::kFree) {
        Fail("TQueBind: the kernel ends with a tensor in use");
      }
    }
  }
}

}  // namespace kvext_shim
