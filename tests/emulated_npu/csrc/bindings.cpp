// SPDX-License-Identifier: Apache-2.0
// The module `torch_npu._emulator`.
#include <torch/extension.h>

#include <cstring>

#include "aliases.h"
#include "counts.h"
#include "device.h"
#include "memory.h"
#include "streams.h"

namespace emulated_npu {
namespace {

std::mutex counts_mutex;
bool is_counting = false;
std::map<std::string, int64_t> counts;

// Kept and dropped under the interpreter's lock, whoever drops it.
std::shared_ptr<py::function> kept(py::function function) {
  return {new py::function(std::move(function)), [](py::function* kept) {
            py::gil_scoped_acquire gil;
            delete kept;
          }};
}

// `function` gets the tensors as CPU tensors of the same memory, when the stream comes to it.
void enqueue_kernel(std::string name, py::function function, const std::vector<at::Tensor>& tensors) {
  const auto stream = current_stream();
  std::vector<at::Tensor> aliases;
  for (const auto& tensor : tensors)
    aliases.push_back(tensor.device().type() == kNpu ? alias_for_work(tensor, stream)
                                                     : tensor.clone());
  auto keeper = kept(std::move(function));
  py::gil_scoped_release without_gil;
  enqueue(stream, std::move(name), [keeper, aliases = std::move(aliases)] {
    py::gil_scoped_acquire gil;
    try {
      (*keeper)(aliases);
    } catch (py::error_already_set& raised) {
      throw std::runtime_error(raised.what());
    }
  });
}

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

at::Tensor alive(const WeakTensor& weak, const char* name) {
  auto strong = weak.lock();
  TORCH_CHECK(strong.defined(), "array ", name, " was freed before the device had read it");
  return at::Tensor(std::move(strong));
}

// One copy after the other, between addresses, when the current stream comes to it. The arrays are
// read then, and so are host and device memory: whoever enqueues has to keep them.
void enqueue_copies(const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& sizes) {
  py::gil_scoped_release without_gil;
  const WeakTensor weak[] = {WeakTensor(sources.getIntrusivePtr()),
                             WeakTensor(targets.getIntrusivePtr()),
                             WeakTensor(sizes.getIntrusivePtr())};
  enqueue(current_stream(), "swap_blocks_batch", [from = weak[0], to = weak[1], many = weak[2]] {
    const auto sources = alive(from, "src_ptrs"), targets = alive(to, "dst_ptrs"),
               sizes = alive(many, "sizes");
    for (int64_t i = 0; i < sizes.numel(); ++i) {
      const auto* source = reinterpret_cast<const void*>(sources.data_ptr<int64_t>()[i]);
      auto* target = reinterpret_cast<void*>(targets.data_ptr<int64_t>()[i]);
      const auto num_bytes = static_cast<size_t>(sizes.data_ptr<int64_t>()[i]);
      TORCH_CHECK(is_mapped(source, num_bytes), "copy ", i, " reads memory that is neither on the ",
                  "device nor pinned, or was freed");
      TORCH_CHECK(is_mapped(target, num_bytes), "copy ", i, " writes memory that is neither on the ",
                  "device nor pinned, or was freed");
      std::memcpy(target, source, num_bytes);
    }
  });
}

struct PythonEvent {
  EventRef event = std::make_shared<Event>();
};

}  // namespace

void count_operator(const std::string& name) {
  if (!is_counting) return;
  std::lock_guard lock(counts_mutex);
  ++counts[name];
}

void count_operators(bool counts_now) { is_counting = counts_now; }

std::map<std::string, int64_t> operator_counts() {
  std::lock_guard lock(counts_mutex);
  return counts;
}

}  // namespace emulated_npu

PYBIND11_MODULE(_emulator, m) {
  using namespace emulated_npu;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  m.def("start", [](int count) { start(static_cast<c10::DeviceIndex>(count)); });
  m.def("set_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("current_device", [] { return int{current_device()}; });
  m.def("device_count", [] { return int{device_count()}; });
  m.def("allocated_bytes", &allocated_bytes);
  m.def("peak_bytes", &peak_bytes);
  m.def("reset_peak_bytes", &reset_peak_bytes);
  m.def("count_operator", &count_operator);
  m.def("count_operators", &count_operators);
  m.def("operator_counts", &operator_counts);

  m.def("set_seed", &set_seed, without_gil);
  m.def("seed", &seed, without_gil);
  m.def("num_in_flight", &num_in_flight, without_gil);
  m.def("new_stream", &new_stream);
  m.def("current_stream", &current_stream);
  m.def("set_current_stream", &set_current_stream);
  m.def("synchronize_stream", &synchronize_stream, without_gil);
  m.def("synchronize_all", &synchronize_all, without_gil);
  m.def("query_stream", &query_stream, without_gil);
  py::class_<PythonEvent>(m, "Event")
      .def(py::init<>())
      .def("record", [](PythonEvent& self, int64_t stream) { record(self.event, stream); }, without_gil)
      .def("wait", [](PythonEvent& self, int64_t stream) { wait(self.event, stream); }, without_gil)
      .def("synchronize", [](PythonEvent& self) { synchronize_event(self.event); }, without_gil)
      .def("query", [](PythonEvent& self) { return query_event(self.event); }, without_gil)
      .def_property_readonly("time_s", [](PythonEvent& self) { return self.event->time_s; });

  m.def("enqueue_kernel", &enqueue_kernel);
  m.def("enqueue_copies", &enqueue_copies);
  // For what runs on the host: the stream is synchronized first.
  m.def("as_cpu", [](const at::Tensor& tensor) {
    { py::gil_scoped_release release; synchronize_stream(current_stream()); }
    Aliases aliases;
    return aliases.cpu(tensor);
  });
  m.def("as_npu", [](const at::Tensor& tensor) { Aliases aliases; return aliases.device(tensor); });
}
