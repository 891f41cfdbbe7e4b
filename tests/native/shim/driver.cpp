// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// The launcher's functions on a host: the kernel runs before the launch returns.
#include <string>
#include <vector>

#include "kernel_operator.h"
#include "launcher.h"
#include "work_table.h"

extern "C" void kvext_page_transfer(GM_ADDR table);

namespace {

// Device addresses of mapped host memory, away from any address of this process.
constexpr uint64_t kMappingOffset = uint64_t{1} << 60;

struct Region {
  void* bytes;
  uint64_t num_bytes;
  bool is_mapped;
  bool is_writable;
};

struct Settings {
  std::vector<Region> regions;
  int64_t num_cores = 1;
};

Settings settings;
std::string violation;

void RunCores(uint32_t num_cores, void* table) {
  kvext_shim::GlobalMemory memory;
  for (const Region& region : settings.regions) {
    const uint64_t address = reinterpret_cast<uint64_t>(region.bytes);
    memory.Register(region.is_mapped ? address + kMappingOffset : address, region.bytes,
                    region.num_bytes, region.is_writable);
  }
  kvext_shim::RunCores(memory, num_cores,
                       [table] { kvext_page_transfer(static_cast<uint8_t*>(table)); });
}

}  // namespace

// Begins a launch: nothing is registered.
KVEXT_EXPORT void kvext_shim_reset(int64_t num_cores) {
  settings = {};
  settings.num_cores = num_cores;
}

// Lets the kernel read the region, or write every byte of it at most once.
KVEXT_EXPORT void kvext_shim_register(void* bytes, uint64_t num_bytes, int32_t is_mapped,
                                      int32_t is_writable) {
  settings.regions.push_back({bytes, num_bytes, is_mapped != 0, is_writable != 0});
}

// The reason why the latest launch failed.
KVEXT_EXPORT const char* kvext_shim_violation() { return violation.c_str(); }

void kvext_ascend_limits(KernelLimits* limits) {
  *limits = {kvext::kTileBytes, kvext::kDataBlockBytes, kvext::kMaxRunsPerUnit};
}

int32_t kvext_ascend_num_cores(int64_t* num_cores) {
  *num_cores = settings.num_cores;
  return 0;
}

int32_t kvext_ascend_map_host(void* address, uint64_t, void** device_address) {
  *device_address =
      reinterpret_cast<void*>(reinterpret_cast<uint64_t>(address) + kMappingOffset);
  return 0;
}

int32_t kvext_ascend_unmap_host(void*) { return 0; }

int32_t kvext_ascend_page_transfer(uint32_t num_cores, void*, void* table) {
  violation.clear();
  try {
    RunCores(num_cores, table);
  } catch (const kvext_shim::Violation& error) {
    violation = error.what();
  }
  return violation.empty() ? 0 : 1;
}
