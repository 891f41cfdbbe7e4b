// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// What the Python package torch_npu uses of the emulated NPU.
#include "device.h"
#include "graphs.h"
#include "tensors.h"

#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace py = pybind11;

namespace emulated_npu {
namespace {

// A Python function that any thread may call, and drop.
using SharedFunction = std::shared_ptr<py::function>;

SharedFunction shared(py::function function) {
  return SharedFunction(new py::function(std::move(function)), [](py::function* one) {
    py::gil_scoped_acquire gil;
    delete one;
  });
}

c10::Stream stream_of(int64_t id, int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, static_cast<c10::DeviceIndex>(device)), id);
}

std::function<void()> callable(py::function function) {
  return [function = shared(std::move(function))] {
    py::gil_scoped_acquire gil;
    try {
      (*function)();
    } catch (const py::error_already_set& error) {
      if (!Scheduler::get().is_late()) throw;  // to who has called
      throw std::runtime_error(error.what());
    }
  };
}

void begin_pool_of(py::function allocated) {
  begin_pool([allocated = shared(std::move(allocated))](uintptr_t address, size_t num_bytes) {
    py::gil_scoped_acquire gil;
    (*allocated)(address, num_bytes);
  });
}

// ------------------------------------------------------------------ batched copies

// An array of the host that the device reads when the copies run. It is the caller's to keep it.
class HostArray {
 public:
  HostArray(const char* name, const at::Tensor& tensor)
      : name_(name), storage_(tensor.storage().getWeakStorageImpl()), data_(tensor.const_data_ptr<int64_t>()) {}

  class Reading {
   public:
    explicit Reading(const HostArray& array) : data(array.data_), storage_(array.storage_.lock()) {
      TORCH_CHECK(storage_, "swap_blocks_batch: ", array.name_, " was freed before the device had read it");
    }
    const int64_t* data;

   private:
    c10::intrusive_ptr<c10::StorageImpl> storage_;
  };

 private:
  const char* name_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const int64_t* data_;
};

enum Direction : int64_t { kToDevice, kToHost, kOnDevice };

void copy_batch(const HostArray& sources, const HostArray& destinations, const HostArray& sizes, int64_t count, int64_t direction) {
  const HostArray::Reading from(sources), to(destinations), bytes(sizes);
  for (int64_t i = 0; i < count; ++i) {
    const auto* source = reinterpret_cast<const void*>(from.data[i]);
    auto* destination = reinterpret_cast<void*>(to.data[i]);
    const auto num_bytes = static_cast<size_t>(bytes.data[i]);
    const bool is_source_there = direction == kToDevice ? is_pinned(source, num_bytes) : is_on_npu(source, num_bytes);
    const bool is_destination_there = direction == kToHost ? is_pinned(destination, num_bytes) : is_on_npu(destination, num_bytes);
    TORCH_CHECK(is_source_there && is_destination_there, "swap_blocks_batch: copy ", i, " of ", num_bytes, " bytes ",
                is_source_there ? "to" : "from", " memory that is neither the device's nor pinned (direction ", direction, ")");
    std::memmove(destination, source, num_bytes);
  }
}

void enqueue_copies(const at::Tensor& sources, const at::Tensor& destinations, const at::Tensor& sizes, int64_t direction) {
  for (const auto* tensor : {&sources, &destinations, &sizes}) {
    TORCH_CHECK(tensor->device().is_cpu() && tensor->scalar_type() == at::kLong, "swap_blocks_batch: expected int64 tensors on the CPU");
    TORCH_CHECK(tensor->numel() == sources.numel(), "swap_blocks_batch: expected tensors of one length");
  }
  TORCH_CHECK(direction >= kToDevice && direction <= kOnDevice, "swap_blocks_batch: invalid direction ", direction);
  const auto recorder = Scheduler::get().recorder_of(Scheduler::get().current_stream(current_device()));
  if (recorder) recorder->refuse("swap_blocks_batch (its capture is not emulated)");
  HostArray from("src_ptrs", sources), to("dst_ptrs", destinations), bytes("sizes", sizes);
  enqueue("swap_blocks_batch", [=, count = sources.numel(), quarantine = std::make_shared<Quarantine>()] {
    copy_batch(from, to, bytes, count, direction);
  });
}

}  // namespace
}  // namespace emulated_npu

PYBIND11_MODULE(_emulated_npu, m) {
  using namespace emulated_npu;
  m.def("start", &start);
  m.def("set_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("device_count", [] { return static_cast<int>(num_devices()); });

  m.def("set_seed", [](std::optional<uint64_t> seed) { Scheduler::get().seed(seed); });
  m.def("num_in_flight", [] { return Scheduler::get().num_pending(); });
  m.def("synchronize_all", [] { Scheduler::get().synchronize_device(); });
  m.def("synchronize_current_stream", &synchronize_current_stream);
  m.def("current_stream", [](int device) {
    return Scheduler::get().current_stream(static_cast<c10::DeviceIndex>(device)).id();
  });
  m.def("set_current_stream", [](int64_t id, int device) {
    Scheduler::get().exchange_current_stream(stream_of(id, device));
  });
  m.def("elapsed_ms", [](uintptr_t first, uintptr_t second) {
    return elapsed_ms(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second));
  });

  m.def("enqueue_kernel", [](std::string name, py::function function) {
    enqueue(std::move(name), callable(std::move(function)));
  });
  m.def("enqueue_copies", &enqueue_copies);
  m.def("alias", [](const at::Tensor& tensor) { return CpuAliases().of(tensor); },
        "The same memory as a tensor on the CPU; what is in flight is not waited for.");
  m.def("new_tensor", [](const std::vector<int64_t>& sizes, at::ScalarType type) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
    return new_npu_tensor(sizes, strides, type);
  });

  m.def("weak_reference", &weak_reference);

  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool);
  py::class_<TaskGroup, TaskGroupPtr>(m, "TaskGroup");
  py::class_<ExternalEvent>(m, "ExternalEvent")
      .def(py::init<>())
      .def("record", [](ExternalEvent& event, int64_t id, int device) { event.record(stream_of(id, device)); })
      .def("wait", [](ExternalEvent& event, int64_t id, int device) { event.wait(stream_of(id, device)); })
      .def("reset", [](ExternalEvent& event, int64_t id, int device) { event.reset(stream_of(id, device)); });
  m.def("new_graph_pool", &new_graph_pool);
  m.def("is_capturing", [](int64_t id, int device) { return is_capturing(stream_of(id, device)); });
  m.def("num_replays", &num_replays);
  m.def("begin_task_group", [](int64_t id, int device) { begin_task_group(stream_of(id, device)); });
  m.def("end_task_group", [](int64_t id, int device) { return end_task_group(stream_of(id, device)); });
  m.def("begin_update", [](int64_t id, int device, TaskGroupPtr group) { begin_update(stream_of(id, device), std::move(group)); });
  m.def("end_update", [](int64_t id, int device) { end_update(stream_of(id, device)); });

  m.def("allocated_bytes", [] { return memory_statistics().allocated_bytes; });
  m.def("peak_bytes", [] { return memory_statistics().peak_bytes; });
  m.def("reset_peak_bytes", &reset_peak_bytes);
  m.def("set_memory_limit", &set_memory_limit);

  m.def("begin_pool", &begin_pool_of);
  m.def("end_pool", &end_pool);
  m.def("unmap", &unmap);
  m.def("map", &map);
  m.def("copy_memory", &copy_memory);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
}
