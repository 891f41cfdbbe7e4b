// SPDX-License-Identifier: Apache-2.0
// One launch on a host: its cores, one after the other. Which is first makes no difference: what a
// core reads no core writes, and a byte is written once.
#pragma once

#include <cstdint>
#include <memory>

#include "memory.h"

namespace kvext_shim {

// Throws Violation.
template <typename Kernel>
void RunCores(GlobalMemory& memory, uint32_t num_cores, Kernel kernel) {
  struct Leave {
    ~Leave() { current_core = nullptr; }
  } leave;
  for (uint32_t index = 0; index < num_cores; ++index) {
    const auto core = std::make_unique<Core>();
    core->memory = &memory;
    core->index = index;
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
