// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "runtime.h"

#include "device.h"
#include "memory.h"

#include <c10/util/Exception.h>

#include <cstdio>

using namespace emulated_npu;

int32_t emulated_npu_current_device() { return current_device(); }

bool emulated_npu_has_memory(const void* address, uint64_t num_bytes) { return is_on_npu(address, num_bytes); }

int32_t emulated_npu_enqueue(void* stream, const char* name, const char* (*run)(void*), void (*drop)(void*), void* argument) {
  const c10::Device device(kNpu, current_device());
  const c10::Stream on(c10::Stream::UNSAFE, device, reinterpret_cast<intptr_t>(stream));
  std::shared_ptr<void> kept(argument, drop);
  auto work = [run, kept = std::move(kept), quarantine = std::make_shared<Quarantine>()] {
    const auto* error = run(kept.get());
    TORCH_CHECK(!error, error);
  };
  try {
    Scheduler::get().enqueue(on, {name, std::move(work), nullptr, nullptr});
  } catch (const std::exception& error) {  // Who calls from C knows no exceptions.
    std::fprintf(stderr, "npu: %s: %s\n", name, error.what());
    return 1;
  }
  return 0;
}
