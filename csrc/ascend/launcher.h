// SPDX-License-Identifier: Apache-2.0
// The functions that Python calls, through ctypes: plain C, no torch, no exceptions. Codes are those
// of CANN's runtime (aclError); 0 is success.
#pragma once

#include <cstdint>

#define KVEXT_EXPORT extern "C" __attribute__((visibility("default")))

// The limits that the table's builder must respect, from work_table.h.
struct KernelLimits {
  int64_t tile_bytes;
  int64_t data_block_bytes;
  int64_t max_runs_per_unit;
};

KVEXT_EXPORT void kvext_ascend_limits(KernelLimits* limits);

// Vector cores of the current device.
KVEXT_EXPORT int32_t kvext_ascend_num_cores(int64_t* num_cores);

// Makes host memory visible to the current device, until it is unmapped.
KVEXT_EXPORT int32_t kvext_ascend_map_host(void* address, uint64_t num_bytes,
                                           void** device_address);
KVEXT_EXPORT int32_t kvext_ascend_unmap_host(void* address);

// Enqueues the kernel. `table` lies in device memory and must stay until the stream has passed.
KVEXT_EXPORT int32_t kvext_ascend_page_transfer(uint32_t num_cores, void* stream, void* table);
