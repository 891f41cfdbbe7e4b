// SPDX-License-Identifier: Apache-2.0
// Memory of the emulated device, and pinned host memory: both are host memory.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

namespace emulated_npu {

// One allocation on the device. It lives as long as a tensor or work in flight refers to it.
struct Block {
  Block(void* data, size_t num_bytes, int64_t stream);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* const data;
  const size_t num_bytes;
  // The stream that was current when it was allocated. What is allocated there later may take the
  // same memory as soon as the host has freed it.
  const int64_t stream;
  // Work in flight that uses it, by stream.
  std::map<int64_t, int64_t> num_uses;
  // Streams that `record_stream` has named: the allocator waits for them.
  std::set<int64_t> recorded_streams;
};
using BlockRef = std::shared_ptr<Block>;

// The allocation that an address lies in; null if there is none (any more).
BlockRef find_block(const void* address);

// Whether [data, data + num_bytes) lies in one allocation of the device or of pinned memory.
bool is_mapped(const void* data, size_t num_bytes);
bool is_pinned(const void* data);

// Keeps a block in use by one stream, for work in flight.
class Use {
 public:
  Use(BlockRef block, int64_t stream);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  BlockRef block_;
  int64_t stream_;
};

void record_stream(const void* address, int64_t stream);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

int64_t allocated_bytes();
int64_t peak_bytes();
void reset_peak_bytes();

}  // namespace emulated_npu
