// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// CANN's calls for the launcher of csrc/ascend, on the emulated NPU. A launch is enqueued on the
// stream that it names, and the kernel's source, compiled against the shim, runs when the stream
// comes to it. It reaches what the device has, and host memory that is registered then.
//
// The build includes acl.h before this file: see kernel_launcher.py.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "csrc/runtime.h"
#include "kernel_operator.h"
#include "work_table.h"

extern "C" void kvext_page_transfer(GM_ADDR table);

namespace {

constexpr int64_t kVectorCores = 48;  // torch_npu/npu/devices.py says so too
constexpr int32_t kInvalidParameter = 107000;
constexpr int32_t kInternalError = 507899;
// Device addresses of registered host memory, away from any address of this process.
constexpr uint64_t kMappingOffset = uint64_t{1} << 60;

std::atomic<int64_t> num_launches{0};
std::atomic<int64_t> num_ended{0};
std::atomic<int64_t> written_bytes{0};
std::atomic<bool> is_skipping_loads{false};

class Registered {
 public:
  bool Add(uint64_t address, uint64_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    return sizes_.emplace(address, num_bytes).second;
  }
  bool Remove(uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return sizes_.erase(address) == 1;
  }
  bool Contains(uint64_t address, uint64_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = sizes_.upper_bound(address);
    if (after == sizes_.begin()) {
      return false;
    }
    --after;
    return address + num_bytes <= after->first + after->second;
  }
  int64_t Count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(sizes_.size());
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> sizes_;
};

Registered registered;

class DeviceMemory : public kvext_shim::GlobalMemory {
 public:
  void Read(uint64_t address, uint64_t num_bytes, void* to) override {
    std::memcpy(to, Find(address, num_bytes, "read"), num_bytes);
  }

  // A byte is written once: two cores that write it would race.
  void Write(uint64_t address, uint64_t num_bytes, const void* from) override {
    const auto next = written_.lower_bound(address);
    const bool meets_next = next != written_.end() && next->first < address + num_bytes;
    const bool meets_last = next != written_.begin() && std::prev(next)->second > address;
    if (meets_next || meets_last) {
      kvext_shim::Fail("some of ", num_bytes, " bytes at ", address, " is written twice");
    }
    written_.emplace_hint(next, address, address + num_bytes);
    std::memcpy(Find(address, num_bytes, "write"), from, num_bytes);
    written_bytes += static_cast<int64_t>(num_bytes);
  }

 private:
  static void* Find(uint64_t address, uint64_t num_bytes, const char* access) {
    if (address >= kMappingOffset && registered.Contains(address - kMappingOffset, num_bytes)) {
      return reinterpret_cast<void*>(address - kMappingOffset);
    }
    auto* const bytes = reinterpret_cast<void*>(address);
    if (!emulated_npu_has_memory(bytes, num_bytes)) {
      kvext_shim::Fail(access, " of ", num_bytes, " bytes at ", address,
                       ", which is neither the device's memory nor registered");
    }
    return bytes;
  }

  std::map<uint64_t, uint64_t> written_;  // Ends by beginnings.
};

struct Launch {
  uint32_t num_cores;
  uint8_t* table;
  std::string violation;
};

const char* Run(void* argument) {
  auto& launch = *static_cast<Launch*>(argument);
  ++num_ended;
  try {
    DeviceMemory memory;
    int64_t direction = 0;
    memory.Read(reinterpret_cast<uint64_t>(launch.table) + kvext::kHeaderDirection * sizeof(int64_t),
                sizeof(direction), &direction);
    if (is_skipping_loads && direction != kvext::kPagesToHost) {
      return nullptr;
    }
    kvext_shim::RunCores(memory, launch.num_cores, [&launch] { kvext_page_transfer(launch.table); });
  } catch (const kvext_shim::Violation& error) {
    launch.violation = error.what();
    return launch.violation.c_str();
  }
  return nullptr;
}

}  // namespace

extern "C" {

aclError aclrtGetDevice(int32_t* device) {
  *device = emulated_npu_current_device();
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  *value = kVectorCores;
  return attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM ? ACL_SUCCESS : kInvalidParameter;
}

aclError aclrtHostRegister(void* host, uint64_t size, aclrtHostRegisterType, void** device) {
  const auto address = reinterpret_cast<uint64_t>(host);
  *device = reinterpret_cast<void*>(address + kMappingOffset);
  return registered.Add(address, size) ? ACL_SUCCESS : kInvalidParameter;
}

aclError aclrtHostUnregister(void* host) {
  return registered.Remove(reinterpret_cast<uint64_t>(host)) ? ACL_SUCCESS : kInvalidParameter;
}

uint32_t aclrtlaunch_kvext_page_transfer(uint32_t cores, aclrtStream stream, void* table) {
  ++num_launches;
  auto* const launch = new Launch{cores, static_cast<uint8_t*>(table), {}};
  const auto drop = [](void* argument) { delete static_cast<Launch*>(argument); };
  return emulated_npu_enqueue(stream, "kvext_page_transfer", Run, drop, launch) ? kInternalError : 0;
}

// For tests: launches so far, those that have run, bytes that they have written, and mappings.
void emulated_launches_counts(int64_t* counts) {
  counts[0] = num_launches;
  counts[1] = num_ended;
  counts[2] = written_bytes;
  counts[3] = registered.Count();
}

// From now on kernels that load copy nothing: with it, comparisons have to fail.
void emulated_launches_skip_loads(int32_t is_skipping) { is_skipping_loads = is_skipping != 0; }

}
