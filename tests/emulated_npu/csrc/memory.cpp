// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "memory.h"

#include "device.h"
#include "graphs.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>

#include <cstdlib>
#include <cstring>

namespace emulated_npu {
namespace {

constexpr int kNotANumber = 0xff;  // as bytes of any floating type
constexpr int kNoIndex = 0x7f;     // a large number of any integer type

// ------------------------------------------------------------------ addresses

class Ranges {
 public:
  void add(const void* data, size_t num_bytes) {
    std::lock_guard lock(mutex_);
    sizes_[reinterpret_cast<uintptr_t>(data)] = num_bytes;
  }
  void remove(const void* data) {
    std::lock_guard lock(mutex_);
    sizes_.erase(reinterpret_cast<uintptr_t>(data));
  }
  bool contains(const void* data, size_t num_bytes) {
    const auto first = reinterpret_cast<uintptr_t>(data);
    std::lock_guard lock(mutex_);
    auto after = sizes_.upper_bound(first);
    if (after == sizes_.begin()) return false;
    --after;
    return first + num_bytes <= after->first + after->second;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, size_t> sizes_;
};

Ranges& npu_ranges() {
  static auto* ranges = new Ranges;
  return *ranges;
}

Ranges& pinned_ranges() {
  static auto* ranges = new Ranges;
  return *ranges;
}

// ------------------------------------------------------------------ bytes

std::mutex quarantine_mutex;
int num_quarantines = 0;
std::vector<std::pair<void*, Ranges*>> quarantined;

void* get_bytes(size_t num_bytes, size_t taken_bytes, size_t alignment, Ranges& ranges) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, alignment, taken_bytes) == 0, "the host has no ", taken_bytes, " bytes for the emulated NPU");
  ranges.add(data, num_bytes);
  return data;
}

void give_back_bytes(void* data, Ranges& ranges) {
  {
    std::lock_guard lock(quarantine_mutex);
    if (num_quarantines) {
      quarantined.emplace_back(data, &ranges);
      return;
    }
  }
  ranges.remove(data);
  std::free(data);
}

// ------------------------------------------------------------------ statistics

std::mutex statistics_mutex;
MemoryStatistics statistics;

void count_bytes(int64_t num_bytes) {
  std::lock_guard lock(statistics_mutex);
  const auto bytes = statistics.allocated_bytes + num_bytes;
  TORCH_CHECK(num_bytes <= 0 || !statistics.limit_bytes || bytes <= statistics.limit_bytes,
              "NPU out of memory. Tried to allocate ", num_bytes, " bytes, of ", statistics.limit_bytes, " bytes ",
              statistics.allocated_bytes, " are allocated (emulated)");
  statistics.allocated_bytes = bytes;
  statistics.peak_bytes = std::max(statistics.peak_bytes, bytes);
}

// ------------------------------------------------------------------ pools

std::mutex pool_mutex;
std::function<void(uintptr_t, size_t)> pool_allocated;  // empty outside of a pool

std::map<uintptr_t, BlockPtr>& pooled_blocks() {
  static auto* blocks = new std::map<uintptr_t, BlockPtr>;
  return *blocks;
}

BlockPtr pooled_block(uintptr_t address) {
  std::lock_guard lock(pool_mutex);
  const auto found = pooled_blocks().find(address);
  TORCH_CHECK(found != pooled_blocks().end(), "the emulated NPU has no memory of a pool at ", address);
  return found->second;
}

bool is_in_pool() {
  std::lock_guard lock(pool_mutex);
  return static_cast<bool>(pool_allocated);
}

void add_to_pool(const BlockPtr& block) {
  const auto address = reinterpret_cast<uintptr_t>(block->data);
  std::function<void(uintptr_t, size_t)> allocated;
  {
    std::lock_guard lock(pool_mutex);
    pooled_blocks()[address] = block;
    allocated = pool_allocated;
  }
  allocated(address, block->num_bytes);
}

// ------------------------------------------------------------------ memory of the NPU

void drop_reference(void* context) { delete static_cast<BlockPtr*>(context); }

void free_block(void* context) {
  std::unique_ptr<BlockPtr> reference(static_cast<BlockPtr*>(context));
  if (!reference) return;
  auto block = *reference;
  auto& scheduler = Scheduler::get();
  if (block->graph) return note_freed(block);
  if (!block->is_pooled) count_bytes(-static_cast<int64_t>(block->num_bytes));
  if (!scheduler.is_late()) return;
  Task poison{"poison of freed memory", [block] { block->poison(); }, nullptr, nullptr};
  if (block->used_on.empty()) return scheduler.append(block->stream, std::move(poison));
  std::vector<MarkerPtr> passed;
  block->used_on.push_back(block->stream);
  for (const auto& stream : block->used_on) {
    auto marker = std::make_shared<Marker>();
    marker->stream = stream;
    scheduler.append(stream, {"mark freed memory", {}, nullptr, marker});
    passed.push_back(std::move(marker));
  }
  scheduler.append_after(std::move(passed), std::move(poison));
}

struct NpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kNpu, current_device());
    if (!num_bytes) return {nullptr, nullptr, &free_block, device};
    auto block = std::make_shared<Block>(num_bytes, Scheduler::get().current_stream(device.index()));
    auto* data = block->data;
    if (const auto recorder = Scheduler::get().recorder_of(block->stream)) {
      block->graph = recorder->memory();
      recorder->note_allocated(block);
    }
    if (block->is_pooled) add_to_pool(block);
    return {data, new BlockPtr(std::move(block)), &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    Scheduler::get().synchronize_device();
    std::memcpy(to, from, num_bytes);
  }
};

// ------------------------------------------------------------------ pinned memory

// What copies of tensors still need, they hold: torch's allocator of pinned memory would wait for
// them as well. Raw addresses hold nothing.
void free_pinned(void* context) {
  std::unique_ptr<std::pair<void*, size_t>> bytes(static_cast<std::pair<void*, size_t>*>(context));
  if (!bytes) return;
  if (Scheduler::get().is_late()) std::memset(bytes->first, kNotANumber, bytes->second);
  give_back_bytes(bytes->first, pinned_ranges());
}

// torch's allocator of pinned memory (CachingHostAllocatorImpl::allocate), from which that of torch_npu
// is derived, asks the driver for a power of two. A driver takes all pages at once.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    if (!num_bytes) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    const auto taken_bytes = c10::llvm::PowerOf2Ceil(num_bytes);
    auto* data = get_bytes(num_bytes, taken_bytes, 4096, pinned_ranges());
    std::memset(data, 0, taken_bytes);
    return {data, new std::pair<void*, size_t>(data, num_bytes), &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

}  // namespace

Block::Block(size_t num_bytes, c10::Stream stream) : num_bytes(num_bytes), stream(stream), is_pooled(is_in_pool()) {
  count_bytes(static_cast<int64_t>(num_bytes));
  data = get_bytes(num_bytes, num_bytes, 512, npu_ranges());
}

Block::~Block() {
  if (graph) count_bytes(-static_cast<int64_t>(num_bytes));
  give_back_bytes(data, npu_ranges());
}

void Block::poison() const { std::memset(data, holds_floats ? kNotANumber : kNoIndex, num_bytes); }

c10::Allocator* npu_allocator() {
  static auto* allocator = new NpuAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

BlockPtr block_of(const c10::StorageImpl& storage) {
  const auto& data = storage.data_ptr();
  if (!data.get_context()) return nullptr;
  TORCH_CHECK(data.get_deleter() == &free_block || data.get_deleter() == &drop_reference, "a tensor on npu whose memory the emulated NPU has not allocated");
  return *static_cast<BlockPtr*>(data.get_context());
}

c10::Storage weak_storage_of(const c10::Storage& storage) {
  const auto block = block_of(*storage.unsafeGetStorageImpl());
  c10::DataPtr data(nullptr, storage.device());
  if (block) data = c10::DataPtr(block->data, new BlockPtr(block), &drop_reference, storage.device());
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), npu_allocator(), false);
}

c10::Storage cpu_storage_of(const BlockPtr& block, size_t num_bytes) {
  c10::DataPtr data(nullptr, c10::Device(c10::kCPU));
  TORCH_CHECK(!block || block->is_mapped, "a tensor on npu whose memory is unmapped: its pool sleeps");
  if (block) data = c10::DataPtr(block->data, new BlockPtr(block), &drop_reference, c10::Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), num_bytes, std::move(data), c10::GetCPUAllocator(), true);
}

void begin_pool(std::function<void(uintptr_t, size_t)> allocated) {
  std::lock_guard lock(pool_mutex);
  TORCH_CHECK(!pool_allocated, "the emulated NPU has one pool at a time");
  pool_allocated = std::move(allocated);
}

void end_pool() {
  std::lock_guard lock(pool_mutex);
  pool_allocated = nullptr;
}

void unmap(uintptr_t address) {
  const auto block = pooled_block(address);
  TORCH_CHECK(block->is_mapped.exchange(false), "unmap: memory at ", address, " is not mapped");
  npu_ranges().remove(block->data);
  count_bytes(-static_cast<int64_t>(block->num_bytes));
  block->poison();
}

void map(uintptr_t address) {
  const auto block = pooled_block(address);
  TORCH_CHECK(!block->is_mapped, "map: memory at ", address, " is mapped");
  count_bytes(static_cast<int64_t>(block->num_bytes));
  npu_ranges().add(block->data, block->num_bytes);
  block->poison();
  block->is_mapped = true;
}

void copy_memory(uintptr_t to, uintptr_t from, size_t num_bytes, bool is_to_host) {
  auto* destination = reinterpret_cast<void*>(to);
  const auto* source = reinterpret_cast<const void*>(from);
  const auto* of_device = is_to_host ? source : destination;
  const auto* of_host = is_to_host ? destination : source;
  TORCH_CHECK(is_on_npu(of_device, num_bytes) && is_pinned(of_host, num_bytes),
              "memcpy: ", num_bytes, " bytes that are not the device's on one side and pinned on the other");
  std::memcpy(destination, source, num_bytes);
}

int register_host(uintptr_t address, size_t num_bytes) {
  constexpr int kInvalidParameter = 107000;  // ACL_ERROR_RT_PARAM_INVALID
  const auto* data = reinterpret_cast<const void*>(address);
  if (address % 4096 || !num_bytes || is_pinned(data)) return kInvalidParameter;
  pinned_ranges().add(data, num_bytes);
  return 0;
}

int unregister_host(uintptr_t address) {
  Scheduler::get().synchronize_device();
  pinned_ranges().remove(reinterpret_cast<const void*>(address));
  return 0;
}

bool is_pinned(const void* data, size_t num_bytes) { return data && pinned_ranges().contains(data, num_bytes); }

bool is_on_npu(const void* data, size_t num_bytes) { return data && npu_ranges().contains(data, num_bytes); }

MemoryStatistics memory_statistics() {
  std::lock_guard lock(statistics_mutex);
  return statistics;
}

void reset_peak_bytes() {
  std::lock_guard lock(statistics_mutex);
  statistics.peak_bytes = statistics.allocated_bytes;
}

void set_memory_limit(int64_t num_bytes) {
  std::lock_guard lock(statistics_mutex);
  statistics.limit_bytes = num_bytes;
}

Quarantine::Quarantine() {
  std::lock_guard lock(quarantine_mutex);
  ++num_quarantines;
}

Quarantine::~Quarantine() {
  std::vector<std::pair<void*, Ranges*>> freed;
  {
    std::lock_guard lock(quarantine_mutex);
    if (--num_quarantines == 0) freed.swap(quarantined);
  }
  for (const auto& [data, ranges] : freed) {
    ranges->remove(data);
    std::free(data);
  }
}

}  // namespace emulated_npu
