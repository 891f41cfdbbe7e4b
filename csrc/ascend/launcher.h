// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The functions that Python calls through ctypes: plain C, without torch and without exceptions.
// The functions return error codes of CANN's runtime (aclError); 0 is success.
#pragma once

#include <cstdint>

#define KVEXT_EXPORT extern "C" __attribute__((visibility("default")))

// Limits from work_table.h that the Python code which builds the table must respect.
struct KernelLimits {
  int64_t tile_bytes;
  int64_t data_block_bytes;
  int64_t max_runs_per_unit;
};

KVEXT_EXPORT void kvext_ascend_limits(KernelLimits* limits);

// Writes the number of vector cores of the current device.
KVEXT_EXPORT int32_t kvext_ascend_num_cores(int64_t* num_cores);

// Makes host memory visible to the current device, until it is unmapped.
KVEXT_EXPORT int32_t kvext_ascend_map_host(void* address, uint64_t num_bytes,
                                           void** device_address);
KVEXT_EXPORT int32_t kvext_ascend_unmap_host(void* address);

// Enqueues the kernel. `table` lies in device memory, and must stay until the kernel has run.
KVEXT_EXPORT int32_t kvext_ascend_page_transfer(uint32_t num_cores, void* stream, void* table);
