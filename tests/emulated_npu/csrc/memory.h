// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Memory of the emulated NPU, which is host memory, and pinned memory of the host.
//
// A tensor that the host drops is gone for the host only: work in flight still has its bytes. What a
// caching allocator does to them, which may hand them out again on the stream that they were
// allocated on, is emulated by a poison: a fill on that stream, behind what it has been given so far.
// So work of another stream, which nobody has made known with record_stream, may read the poison.
// What a capture allocates belongs to its graph: graphs.h.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <functional>
#include <unordered_set>

namespace emulated_npu {

class Block {
 public:
  Block(size_t num_bytes, c10::Stream stream);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void poison() const;

  void* data = nullptr;
  size_t num_bytes = 0;
  c10::Stream stream;  // that it was allocated on
  bool holds_floats = true;
  const bool is_pooled;               // see begin_pool
  std::atomic<bool> is_mapped{true};  // see unmap
  std::mutex mutex;
  std::vector<c10::Stream> used_on;  // record_stream
  std::shared_ptr<GraphMemory> graph;  // whose capture has allocated it; null: none
  std::atomic<uint64_t> freed_at{0};   // by its graph's clock; 0: a tensor has it
};
using BlockPtr = std::shared_ptr<Block>;

struct MemoryStatistics {
  int64_t allocated_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t limit_bytes = 0;
};

c10::Allocator* npu_allocator();
c10::Allocator* pinned_allocator();

// Storage on the bytes of another one. It does not count as their owner: they are free when the others are gone.
c10::Storage weak_storage_of(const c10::Storage& storage);

// The block behind an npu storage; null if it has no bytes.
BlockPtr block_of(const c10::StorageImpl& storage);
// A CPU storage on the same bytes, which keeps them, but not the npu storage.
c10::Storage cpu_storage_of(const BlockPtr& block, size_t num_bytes);

// What is allocated from here on, by any thread, belongs to a pool: a caller is told its address and
// size. Of such memory the bytes can be taken away and brought back at the same address, as sleep
// mode does. It stays in the pool when its tensors are gone.
void begin_pool(std::function<void(uintptr_t, size_t)> allocated);
void end_pool();
// Nothing waits for work that uses the memory: it is the caller's to have waited.
void unmap(uintptr_t address);
void map(uintptr_t address);
// Between the device and pinned memory, at once.
void copy_memory(uintptr_t to, uintptr_t from, size_t num_bytes, bool is_to_host);

// Pins memory that the process has mapped itself. Returns an error code of the runtime, 0 for success.
int register_host(uintptr_t address, size_t num_bytes);
int unregister_host(uintptr_t address);

bool is_pinned(const void* data, size_t num_bytes = 1);
bool is_on_npu(const void* data, size_t num_bytes);

MemoryStatistics memory_statistics();
void reset_peak_bytes();
void set_memory_limit(int64_t num_bytes);

// While one of these lives no bytes go back to the host's allocator: work that has raw addresses
// may read or write memory that was freed, and finds poison there.
class Quarantine {
 public:
  Quarantine();
  ~Quarantine();
  Quarantine(const Quarantine&) = delete;
  Quarantine& operator=(const Quarantine&) = delete;
};

}  // namespace emulated_npu
