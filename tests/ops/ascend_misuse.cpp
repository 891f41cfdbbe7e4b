// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Kernels that do what the hardware does not allow: the table's first number says which. The shim
// must stop each with a message. test_ascend_shim.py has the list.
#include "kernel_operator.h"

namespace {

using Tensor = AscendC::LocalTensor<uint8_t>;
using Queue = AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2>;

constexpr AscendC::DataCopyPadExtParams<uint8_t> kNoPadding{false, 0, 0, 0};

struct Misuse {
  AscendC::TPipe pipe;
  Queue queue;
  AscendC::GlobalTensor<uint8_t> source;
  AscendC::GlobalTensor<uint8_t> destination;

  Misuse(int64_t from, int64_t to) {
    source.SetGlobalBuffer(reinterpret_cast<uint8_t*>(from));
    destination.SetGlobalBuffer(reinterpret_cast<uint8_t*>(to));
    pipe.InitBuffer(queue, 2, 256);
  }

  void Read(const Tensor& to, uint32_t num_bytes, uint16_t count = 1) {
    AscendC::DataCopyPad(to, source, {count, num_bytes, 0, 0, 0}, kNoPadding);
  }

  void Write(const Tensor& from, uint32_t num_bytes) {
    AscendC::DataCopyPad(destination, from, {1, num_bytes, 0, 0, 0});
  }

  Tensor Filled(uint32_t num_bytes) {
    Tensor tensor = queue.AllocTensor<uint8_t>();
    Read(tensor, num_bytes);
    queue.EnQue(tensor);
    return queue.DeQue<uint8_t>();
  }

  void Run(int64_t which) {
    Tensor tensor;
    switch (which) {
      case 1:
        return pipe.InitBuffer(queue, 1, 192 * 1024);
      case 2:
        return pipe.InitBuffer(queue, 1, 33);
      case 3:
        queue.AllocTensor<uint8_t>();
        queue.AllocTensor<uint8_t>();
        queue.AllocTensor<uint8_t>();
        return;
      case 4:
        queue.DeQue<uint8_t>();
        return;
      case 5:
        queue.AllocTensor<uint8_t>();
        return;
      case 6:
        tensor = queue.AllocTensor<uint8_t>();
        Read(tensor, 8);
        return Write(tensor, 8);
      case 7:
        return Read(Filled(8), 8);
      case 8:
        tensor = Filled(8);
        queue.FreeTensor(tensor);
        return Write(tensor, 8);
      case 9:
        return Read(queue.AllocTensor<uint8_t>()[16], 8);
      case 10:
        return Read(queue.AllocTensor<uint8_t>()[224], 33);
      case 11:
        return Read(queue.AllocTensor<uint8_t>(), 257);
      case 12:
        return Write(Filled(8), 9);
      case 13:
        return Read(queue.AllocTensor<uint8_t>(), 0);
      case 14:
        return Read(queue.AllocTensor<uint8_t>(), 1, 2);
      case 15:
        return Read(queue.AllocTensor<uint8_t>(), 2097152);
      case 16:
        return Read(queue.AllocTensor<uint8_t>(), 240);
      case 17:
        tensor = Filled(8);
        destination = source;
        return Write(tensor, 8);
      case 18:
        tensor = Filled(8);
        Write(tensor, 8);
        return Write(tensor, 8);
      case 19:
        source.SetGlobalBuffer(reinterpret_cast<uint8_t*>(source.address()), 7);
        return Read(queue.AllocTensor<uint8_t>(), 8);
      case 20: {
        AscendC::GlobalTensor<int64_t> numbers;
        numbers.SetGlobalBuffer(reinterpret_cast<int64_t*>(source.address() + 4));
        numbers.GetValue(0);
        return;
      }
      case 21:
        return AscendC::DataCopyPad(queue.AllocTensor<uint8_t>(), source, {1, 8, 0, 0, 0},
                                    {true, 0, 24, 0});
      case 22:
        tensor = queue.AllocTensor<uint8_t>();
        queue.EnQue(tensor);
        return queue.EnQue(tensor);
      default:
        kvext_shim::Fail("no such misuse");
    }
  }
};

}  // namespace

extern "C" __global__ __aicore__ void kvext_page_transfer(GM_ADDR table) {
  AscendC::GlobalTensor<int64_t> numbers;
  numbers.SetGlobalBuffer(reinterpret_cast<int64_t*>(table));
  Misuse(numbers.GetValue(1), numbers.GetValue(2)).Run(numbers.GetValue(0));
}
