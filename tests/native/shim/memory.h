// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Simulated cores and their memories, with a check on every access. A violation throws: the run ends
// with a message instead of a wrong byte.
//
// Limits are those of Atlas A2 and A3, from CANN's reference of DataCopyPad, TPipe and TQueBind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvext_shim {

constexpr int64_t kUnifiedBufferBytes = 192 * 1024;
constexpr int64_t kDataBlockBytes = 32;
constexpr int64_t kMaxBlockBytes = 2097151;

class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] inline void Fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Violation(text.str());
}

inline int64_t RoundUp(int64_t num_bytes) {
  return (num_bytes + kDataBlockBytes - 1) / kDataBlockBytes * kDataBlockBytes;
}

// Memory as the device sees it. Here only what has been registered exists, and its addresses need
// not be those of the bytes behind it; an emulated device has its own.
class GlobalMemory {
 public:
  virtual ~GlobalMemory() = default;

  void Register(uint64_t address, void* bytes, uint64_t num_bytes, bool is_writable) {
    // calloc allocates the pages of a large region only as they are written.
    void* is_written = is_writable ? std::calloc(num_bytes, 1) : nullptr;
    regions_.push_back({address, static_cast<uint8_t*>(bytes), num_bytes,
                        Flags(static_cast<uint8_t*>(is_written), &std::free)});
  }

  virtual void Read(uint64_t address, uint64_t num_bytes, void* to) {
    const Region& region = Find(address, num_bytes, "read");
    std::memcpy(to, region.bytes + (address - region.address), num_bytes);
  }

  // A byte is written once: two cores that write it would race.
  virtual void Write(uint64_t address, uint64_t num_bytes, const void* from) {
    Region& region = Find(address, num_bytes, "write");
    const uint64_t offset = address - region.address;
    if (region.is_written == nullptr) {
      Fail("global memory: write of ", num_bytes, " bytes at ", address,
           " to a region that this transfer only reads");
    }
    for (uint64_t i = offset; i < offset + num_bytes; ++i) {
      if (region.is_written[i] != 0) {
        Fail("global memory: byte ", region.address + i, " written twice");
      }
      region.is_written[i] = 1;
    }
    std::memcpy(region.bytes + offset, from, num_bytes);
  }

 private:
  using Flags = std::unique_ptr<uint8_t[], decltype(&std::free)>;

  struct Region {
    uint64_t address;
    uint8_t* bytes;
    uint64_t num_bytes;
    Flags is_written;  // one per byte; none where the region is only read
  };

  Region& Find(uint64_t address, uint64_t num_bytes, const char* access) {
    for (Region& region : regions_) {
      if (address >= region.address && num_bytes <= region.num_bytes &&
          address - region.address <= region.num_bytes - num_bytes) {
        return region;
      }
    }
    Fail("global memory: ", access, " of ", num_bytes, " bytes at ", address,
         " is not inside a registered region");
  }

  std::vector<Region> regions_;
};

// The stage of a queue's buffer; a tensor may be used only where its buffer stands.
enum class Stage { kFree, kFilling, kQueued, kDraining };

struct Buffer {
  int64_t begin = 0;
  int64_t num_bytes = 0;
  Stage stage = Stage::kFree;
  int64_t use = 0;
};

// One core's unified buffer. A byte is valid once something has been read into it for this use.
class UnifiedBuffer {
 public:
  UnifiedBuffer() : bytes_(kUnifiedBufferBytes), is_valid_(kUnifiedBufferBytes) {}

  Buffer Allocate(int64_t num_bytes) {
    if (num_bytes <= 0 || num_bytes % kDataBlockBytes != 0) {
      Fail("unified buffer: InitBuffer of ", num_bytes, " bytes, not a multiple of ",
           kDataBlockBytes);
    }
    if (num_bytes > kUnifiedBufferBytes - used_bytes_) {
      Fail("unified buffer: InitBuffer of ", num_bytes, " bytes with ",
           kUnifiedBufferBytes - used_bytes_, " of ", kUnifiedBufferBytes, " left");
    }
    used_bytes_ += num_bytes;
    return {used_bytes_ - num_bytes, num_bytes};
  }

  void Invalidate(const Buffer& buffer) {
    std::fill_n(is_valid_.begin() + buffer.begin, buffer.num_bytes, uint8_t{0});
  }

  uint8_t* Fill(const Buffer& buffer, int64_t at, int64_t num_bytes) {
    Check(buffer, at, num_bytes);
    const int64_t first = buffer.begin + at;
    std::fill_n(is_valid_.begin() + first, RoundUp(num_bytes), uint8_t{0});
    std::fill_n(is_valid_.begin() + first, num_bytes, uint8_t{1});
    return &bytes_[first];
  }

  const uint8_t* Drain(const Buffer& buffer, int64_t at, int64_t num_bytes) {
    Check(buffer, at, num_bytes);
    const int64_t first = buffer.begin + at;
    for (int64_t i = first; i < first + num_bytes; ++i) {
      if (!is_valid_[i]) {
        Fail("unified buffer: byte ", i - buffer.begin, " of a tensor is written out, ",
             "but nothing was read into it");
      }
    }
    return &bytes_[first];
  }

 private:
  // The unit of access is the data block: the last one of a range counts in full.
  static void Check(const Buffer& buffer, int64_t at, int64_t num_bytes) {
    if (at % kDataBlockBytes != 0) {
      Fail("unified buffer: tensor begins at byte ", at, ", not on a data block");
    }
    if (at < 0 || at + RoundUp(num_bytes) > buffer.num_bytes) {
      Fail("unified buffer: ", num_bytes, " bytes at byte ", at, " of a tensor of ",
           buffer.num_bytes);
    }
  }

  std::vector<uint8_t> bytes_;
  std::vector<uint8_t> is_valid_;
  int64_t used_bytes_ = 0;
};

// The core that the calls of the kernel on this thread act on.
struct Core {
  GlobalMemory* memory = nullptr;
  UnifiedBuffer unified_buffer;
  std::deque<Buffer> buffers;
  int64_t index = 0;
  int64_t num_cores = 0;
};

inline thread_local Core* current_core = nullptr;

inline Core& ThisCore() {
  if (current_core == nullptr) {
    Fail("shim: called outside a kernel");
  }
  return *current_core;
}

// One launch on a host: its cores, one after the other. Which is first makes no difference: what a
// core reads no core writes, and a byte is written once. Throws Violation.
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
