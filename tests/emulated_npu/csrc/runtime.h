// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// What a library with kernels of its own asks of the emulated NPU, as it would ask CANN's runtime:
// C, without torch. It links the compiled part of the emulator, which its process has loaded.
#pragma once

#include <cstdint>

#define EMULATED_NPU_EXPORT extern "C" __attribute__((visibility("default")))

// The current device of this thread.
EMULATED_NPU_EXPORT int32_t emulated_npu_current_device();

// Whether all of these bytes are memory of the device. What is freed counts while work is in flight
// that was enqueued here before: it finds poison there.
EMULATED_NPU_EXPORT bool emulated_npu_has_memory(const void* address, uint64_t num_bytes);

// Enqueues work on a stream of the current device, by its handle (`npu_stream`).
//
// `run` gets `argument` when the stream comes to it, in whatever thread. It returns nothing, or what
// is wrong, which the next wait raises, as after any kernel. `drop` ends the argument, run or not.
// Returns 0, or 1 where it has failed at the call; standard error says why.
EMULATED_NPU_EXPORT int32_t emulated_npu_enqueue(void* stream, const char* name,
                                                 const char* (*run)(void* argument),
                                                 void (*drop)(void* argument), void* argument);
