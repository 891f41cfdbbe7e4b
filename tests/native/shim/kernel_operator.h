// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Stands in for CANN's kernel_operator.h, so that the kernel's source compiles and runs on a host:
// the few calls it makes, with their documented limits enforced. Copies happen when called, in
// order; the stage of each buffer tells what the hardware would run side by side.
#pragma once

#include <cstdint>

#include "memory.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t*
#define KERNEL_TYPE_AIV_ONLY 0
#define KERNEL_TASK_TYPE_DEFAULT(type) static_cast<void>(type)

namespace AscendC {

enum class TPosition { GM, VECIN, VECOUT };

inline int64_t GetBlockIdx() { return kvext_shim::ThisCore().index; }
inline int64_t GetBlockNum() { return kvext_shim::ThisCore().num_cores; }

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* address, uint64_t num_elements = 0) {
    address_ = reinterpret_cast<uint64_t>(address);
    num_elements_ = num_elements;
  }

  T GetValue(uint64_t index) const {
    CheckSize((index + 1) * sizeof(T));
    const uint64_t address = address_ + index * sizeof(T);
    if (address % sizeof(T) != 0) {
      kvext_shim::Fail("GlobalTensor: scalar read at ", address, ", not a multiple of ",
                       sizeof(T));
    }
    T value;
    kvext_shim::ThisCore().memory->Read(address, sizeof(T), &value);
    return value;
  }

  uint64_t address() const { return address_; }

  void CheckSize(uint64_t num_bytes) const {
    if (num_elements_ != 0 && num_bytes > num_elements_ * sizeof(T)) {
      kvext_shim::Fail("GlobalTensor: ", num_bytes, " bytes of a tensor of ",
                       num_elements_ * sizeof(T));
    }
  }

 private:
  uint64_t address_ = 0;
  uint64_t num_elements_ = 0;  // 0: the kernel did not say
};

template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  explicit LocalTensor(kvext_shim::Buffer* buffer) : buffer_(buffer), use_(buffer->use) {}

  LocalTensor operator[](uint32_t index) const {
    LocalTensor tail = *this;
    tail.first_byte_ += static_cast<int64_t>(index) * sizeof(T);
    return tail;
  }

  // The buffer, once it is certain that it stands where `stage` says, and for this tensor.
  kvext_shim::Buffer& At(kvext_shim::Stage stage, const char* call) const {
    if (buffer_ == nullptr || buffer_->use != use_ || buffer_->stage != stage) {
      kvext_shim::Fail("LocalTensor: ", call, " on a tensor that is not the queue's to ",
                       stage == kvext_shim::Stage::kFilling ? "fill" : "drain");
    }
    return *buffer_;
  }

  int64_t first_byte() const { return first_byte_; }

 private:
  kvext_shim::Buffer* buffer_ = nullptr;
  int64_t use_ = 0;
  int64_t first_byte_ = 0;
};

template <TPosition source, TPosition destination, int32_t depth>
class TQueBind {
 public:
  static_assert(source == TPosition::VECIN && destination == TPosition::VECOUT,
                "the shim knows queues from VECIN to VECOUT only");

  void Own(kvext_shim::Buffer* buffer) { buffers_.push_back(buffer); }

  template <typename T>
  LocalTensor<T> AllocTensor() {
    for (kvext_shim::Buffer* buffer : buffers_) {
      if (buffer->stage == kvext_shim::Stage::kFree) {
        buffer->stage = kvext_shim::Stage::kFilling;
        ++buffer->use;
        kvext_shim::ThisCore().unified_buffer.Invalidate(*buffer);
        return LocalTensor<T>(buffer);
      }
    }
    kvext_shim::Fail("TQueBind: AllocTensor with all ", buffers_.size(),
                     " buffers in use: the core would wait for ever");
  }

  template <typename T>
  void EnQue(const LocalTensor<T>& tensor) {
    kvext_shim::Buffer& buffer = tensor.At(kvext_shim::Stage::kFilling, "EnQue");
    if (static_cast<int64_t>(queued_.size()) >= depth) {
      kvext_shim::Fail("TQueBind: EnQue beyond depth ", depth);
    }
    buffer.stage = kvext_shim::Stage::kQueued;
    queued_.push_back(&buffer);
  }

  template <typename T>
  LocalTensor<T> DeQue() {
    if (queued_.empty()) {
      kvext_shim::Fail("TQueBind: DeQue of an empty queue");
    }
    kvext_shim::Buffer* buffer = queued_.front();
    queued_.pop_front();
    buffer->stage = kvext_shim::Stage::kDraining;
    return LocalTensor<T>(buffer);
  }

  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    tensor.At(kvext_shim::Stage::kDraining, "FreeTensor").stage = kvext_shim::Stage::kFree;
  }

 private:
  std::vector<kvext_shim::Buffer*> buffers_;
  std::deque<kvext_shim::Buffer*> queued_;
};

class TPipe {
 public:
  template <TPosition source, TPosition destination, int32_t depth>
  void InitBuffer(TQueBind<source, destination, depth>& queue, uint8_t count,
                  uint32_t num_bytes) {
    kvext_shim::Core& core = kvext_shim::ThisCore();
    for (uint8_t i = 0; i < count; ++i) {
      core.buffers.push_back(core.unified_buffer.Allocate(num_bytes));
      queue.Own(&core.buffers.back());
    }
  }
};

// The parameters of one block. The kernel needs no more, so the shim knows neither several blocks nor
// gaps between them.
struct DataCopyExtParams {
  uint16_t blockCount;
  uint32_t blockLen;
  uint32_t srcStride;
  uint32_t dstStride;
  uint32_t rsv;
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad;
  uint8_t leftPadding;
  uint8_t rightPadding;
  T paddingValue;
};

inline void CheckShape(const DataCopyExtParams& shape) {
  if (shape.blockCount != 1 || shape.srcStride != 0 || shape.dstStride != 0) {
    kvext_shim::Fail("DataCopyPad: the shim knows single blocks only");
  }
  if (shape.blockLen < 1 || shape.blockLen > kvext_shim::kMaxBlockBytes) {
    kvext_shim::Fail("DataCopyPad: blockLen ", shape.blockLen, ", expected 1 to ",
                     kvext_shim::kMaxBlockBytes);
  }
}

// Global memory to the unified buffer. The bytes behind a block, up to a data block, are undefined.
template <typename T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from,
                 const DataCopyExtParams& shape, const DataCopyPadExtParams<T>& padding) {
  CheckShape(shape);
  if (padding.isPad || padding.leftPadding != 0 || padding.rightPadding != 0) {
    kvext_shim::Fail("DataCopyPad: the shim knows no padding");
  }
  kvext_shim::Core& core = kvext_shim::ThisCore();
  kvext_shim::Buffer& buffer = to.At(kvext_shim::Stage::kFilling, "DataCopyPad");
  from.CheckSize(shape.blockLen);
  uint8_t* bytes = core.unified_buffer.Fill(buffer, to.first_byte(), shape.blockLen);
  core.memory->Read(from.address(), shape.blockLen, bytes);
}

// The unified buffer to global memory.
template <typename T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from,
                 const DataCopyExtParams& shape) {
  CheckShape(shape);
  kvext_shim::Core& core = kvext_shim::ThisCore();
  kvext_shim::Buffer& buffer = from.At(kvext_shim::Stage::kDraining, "DataCopyPad");
  to.CheckSize(shape.blockLen);
  core.memory->Write(to.address(), shape.blockLen,
                     core.unified_buffer.Drain(buffer, from.first_byte(), shape.blockLen));
}

}  // namespace AscendC
