// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "device.h"
#include "streams.h"

namespace emulated_npu {
namespace {

constexpr size_t kDeviceAlignmentBytes = 512;
constexpr size_t kPageBytes = 4096;
// NaN as a floating-point number of any width, -1 as an integer.
constexpr int kPoison = 0xFF;

std::mutex mutex;  // Guards everything below, and the books of every block.
std::map<uintptr_t, std::weak_ptr<Block>> blocks;
std::map<uintptr_t, size_t> pinned;
std::atomic<int64_t> num_allocated_bytes{0};
std::atomic<int64_t> num_peak_bytes{0};

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// The entry of a map from first addresses that may contain `address`, or its end.
template <typename Map>
auto entry_at(Map& map, uintptr_t address) {
  auto after = map.upper_bound(address);
  return after == map.begin() ? map.end() : std::prev(after);
}

void* allocate_aligned(size_t alignment_bytes, size_t num_bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, alignment_bytes, num_bytes) == 0,
              "emulated NPU: out of memory; asked for ", num_bytes, " bytes");
  return data;
}

// The host has freed a tensor's memory. On a device, the caching allocator hands it out again to the
// stream that it was allocated on, whatever other streams still do with it.
void free_block(void* context) {
  std::unique_ptr<BlockRef> block(static_cast<BlockRef*>(context));
  num_allocated_bytes -= static_cast<int64_t>((*block)->num_bytes);
  if (!is_late()) return;
  bool is_in_danger = false;
  {
    std::lock_guard lock(mutex);
    for (const auto& [stream, num_uses] : (*block)->num_uses)
      is_in_danger |= num_uses > 0 && stream != (*block)->stream &&
                      !(*block)->recorded_streams.count(stream);
  }
  if (is_in_danger)
    enqueue((*block)->stream, "reuse of freed memory",
            [block = *block] { std::memset(block->data, kPoison, block->num_bytes); });
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kNpu, current_device());
    if (num_bytes == 0) return {nullptr, nullptr, &free_block_of_nothing, device};
    void* data = allocate_aligned(kDeviceAlignmentBytes, num_bytes);
    auto block = std::make_shared<Block>(data, num_bytes, current_stream());
    {
      std::lock_guard lock(mutex);
      blocks[number(data)] = block;
    }
    // Fresh memory of a device holds anything.
    if (is_late()) std::memset(data, kPoison, num_bytes);
    const auto now_bytes = num_allocated_bytes += static_cast<int64_t>(num_bytes);
    if (now_bytes > num_peak_bytes) num_peak_bytes = now_bytes;
    return {data, new BlockRef(std::move(block)), &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
  static void free_block_of_nothing(void*) {}
};

void free_pinned(void* data) {
  {
    std::lock_guard lock(mutex);
    pinned.erase(number(data));
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = nullptr;
    if (num_bytes) {
      data = allocate_aligned(kPageBytes, num_bytes);
      std::lock_guard lock(mutex);
      pinned[number(data)] = num_bytes;
    }
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

}  // namespace

Block::Block(void* data, size_t num_bytes, int64_t stream)
    : data(data), num_bytes(num_bytes), stream(stream) {}

Block::~Block() {
  {
    std::lock_guard lock(mutex);
    blocks.erase(number(data));
  }
  std::free(data);
}

BlockRef find_block(const void* address) {
  BlockRef found;  // Outlives the lock: the destructor of a block takes the mutex.
  {
    std::lock_guard lock(mutex);
    const auto entry = entry_at(blocks, number(address));
    if (entry != blocks.end()) found = entry->second.lock();
  }
  const bool is_inside = found && number(address) < number(found->data) + found->num_bytes;
  return is_inside ? found : nullptr;
}

bool is_pinned(const void* data) {
  std::lock_guard lock(mutex);
  const auto entry = entry_at(pinned, number(data));
  return entry != pinned.end() && number(data) < entry->first + entry->second;
}

bool is_mapped(const void* data, size_t num_bytes) {
  const auto end = number(data) + num_bytes;
  if (const auto block = find_block(data)) return end <= number(block->data) + block->num_bytes;
  std::lock_guard lock(mutex);
  const auto entry = entry_at(pinned, number(data));
  return entry != pinned.end() && end <= entry->first + entry->second;
}

Use::Use(BlockRef block, int64_t stream) : block_(std::move(block)), stream_(stream) {
  std::lock_guard lock(mutex);
  ++block_->num_uses[stream_];
}

Use::~Use() {
  std::lock_guard lock(mutex);
  --block_->num_uses[stream_];
  // `block_` goes after the lock, with the other members.
}

void record_stream(const void* address, int64_t stream) {
  if (const auto block = find_block(address)) {
    std::lock_guard lock(mutex);
    block->recorded_streams.insert(stream);
  }
}

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

int64_t allocated_bytes() { return num_allocated_bytes; }
int64_t peak_bytes() { return num_peak_bytes; }
void reset_peak_bytes() { num_peak_bytes = num_allocated_bytes.load(); }

}  // namespace emulated_npu
