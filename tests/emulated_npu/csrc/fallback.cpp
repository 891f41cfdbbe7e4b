// SPDX-License-Identifier: Apache-2.0
// Every operator of torch on tensors of the device: run on the CPU, on the same memory.
//
// Without a seed an operator runs when it is called. With a seed, it is one of three kinds:
//   views            change no byte: they run at once;
//   on the host      return what depends on bytes (a number, a size), or draw random numbers: the
//                    current stream is synchronized, then they run;
//   late             all others: the sizes of their results are asked of torch's `meta` device,
//                    memory is allocated, and the computation is put in the queue of the stream.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

#include "aliases.h"
#include "counts.h"
#include "device.h"
#include "memory.h"
#include "streams.h"

namespace emulated_npu {
namespace {

using torch::jit::Stack;

// They take indices or scalars from the CPU on a device as well.
const std::set<std::string> takes_both_devices = {
    "aten::index",       "aten::index_put_",           "aten::_index_put_impl_",
    "aten::index_put",   "aten::_unsafe_index",        "aten::_unsafe_index_put",
    "aten::index_fill_", "aten::_has_compatible_shallow_copy_type",
};
// They change the size of an argument, or read it.
const std::set<std::string> runs_on_host = {
    "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::_has_compatible_shallow_copy_type",
};

enum class Kind { kView, kOnHost, kLate };

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

Kind kind_of(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (runs_on_host.count(schema.name())) return Kind::kOnHost;
  if (op.hasTag(at::Tag::inplace_view)) return Kind::kView;
  bool returns_tensors = true, returns_views = !schema.returns().empty();
  for (const auto& returned : schema.returns()) {
    const auto& type = *returned.type();
    returns_tensors &= type.isSubtypeOf(*c10::TensorType::get()) ||
                       type.isSubtypeOf(*c10::ListType::ofTensors());
    returns_views &= returned.alias_info() && !returned.alias_info()->isWrite();
  }
  if (returns_views) return Kind::kView;
  // Random numbers keep their order: all draw from the host's generator.
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return Kind::kOnHost;
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape))
    return Kind::kOnHost;
  return returns_tensors ? Kind::kLate : Kind::kOnHost;
}

Kind cached_kind_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::map<c10::OperatorName, Kind, bool (*)(const c10::OperatorName&, const c10::OperatorName&)>
      kinds([](const c10::OperatorName& a, const c10::OperatorName& b) {
        return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name);
      });
  std::lock_guard lock(mutex);
  const auto found = kinds.find(op.operator_name());
  if (found != kinds.end()) return found->second;
  return kinds.emplace(op.operator_name(), kind_of(op)).first->second;
}

// Replace every tensor among the arguments, and every device, by what the functions return.
template <typename OfTensor, typename OfDevice>
void replace(Stack& stack, size_t first, OfTensor of_tensor, OfDevice of_device) {
  for (size_t i = first; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (value.isTensor()) {
      value = of_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(of_tensor(tensor));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(of_tensor(*tensor)) : std::nullopt);
      value = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == kNpu) {
      value = of_device(value.toDevice());
    }
  }
}

c10::Device cpu_device(c10::Device) { return c10::Device(c10::kCPU); }

void check_devices(const c10::FunctionSchema& schema, Stack& stack, size_t first) {
  bool has_device = false, has_cpu = false;
  for (size_t i = first; i < stack.size(); ++i) {
    const auto see = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      has_device |= tensor.device().type() == kNpu;
      has_cpu |= tensor.device().is_cpu() && tensor.dim() > 0;
    };
    const auto& value = stack[i];
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        if (tensor) see(*tensor);
  }
  TORCH_CHECK(!(has_device && has_cpu) || takes_both_devices.count(schema.name()),
              "emulated NPU: ", schema.name(),
              ": expected all tensors on one device, found tensors on npu and on cpu");
}

// The argument that a result is, by the schema; null if it is none.
const at::Tensor* returned_argument(const c10::FunctionSchema& schema, size_t result,
                                    const Stack& arguments) {
  const auto* alias = schema.returns()[result].alias_info();
  if (!alias || !alias->isWrite()) return nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* of_argument = schema.arguments()[i].alias_info();
    if (of_argument && *of_argument == *alias && arguments[i].isTensor())
      return &arguments[i].toTensor();
  }
  return nullptr;
}

void run_at_once(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  const Stack arguments(stack->begin() + first, stack->end());
  Aliases aliases;  // Holds the CPU tensors until the results are read: see `run_late`.
  replace(*stack, first, [&](const at::Tensor& tensor) { return aliases.cpu(tensor); }, cpu_device);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  aliases.mirror();
  const auto first_result = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[first_result + i];
    if (const auto* argument = returned_argument(schema, i, arguments)) {
      value = *argument;
    } else if (value.isTensor()) {
      value = aliases.device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(aliases.device(tensor));
      value = std::move(list);
    }
  }
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  // Numbers keep their type, and are promoted as numbers.
  const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  if (is_number) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// The results of an operator as tensors without data. None if torch cannot tell without data, or if
// an argument that is written would get another size.
std::optional<Stack> results_on_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack stack = arguments;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  size_t index = 0;
  const auto& schema = op.schema();
  for (auto& value : stack) {
    if (value.isTensor() && index < schema.arguments().size() && writes(schema.arguments()[index])) {
      written.emplace_back(value.toTensor(), on_meta(value.toTensor()));
      value = written.back().second;
    }
    ++index;
  }
  try {
    replace(stack, 0,
            [](const at::Tensor& tensor) { return tensor.is_meta() ? tensor : on_meta(tensor); },
            [](c10::Device) { return c10::Device(c10::kMeta); });
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const c10::Error&) {
    return std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;  // of a kernel in Python
  }
  for (const auto& [argument, meta] : written)
    if (argument.defined() && argument.sizes() != meta.sizes()) return std::nullopt;
  return stack;
}

bool run_late(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  const auto first = stack->size() - num_arguments;
  Stack arguments(stack->begin() + first, stack->end());
  auto metas = results_on_meta(op, arguments);
  if (!metas) return false;

  const auto stream = current_stream();
  // What the work writes its results to, where they are new tensors.
  auto targets = std::make_shared<std::vector<std::vector<at::Tensor>>>();
  Stack results;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& meta = (*metas)[i];
    targets->emplace_back();
    if (const auto* argument = returned_argument(schema, i, arguments)) {
      results.emplace_back(*argument);
      continue;
    }
    const auto make = [&](const at::Tensor& like) {
      if (!like.defined()) return like;
      auto made = empty_on_device(like.sizes(), like.strides(), like.scalar_type());
      targets->back().push_back(alias_for_work(made, stream));
      return made;
    };
    if (meta.isTensor()) {
      results.emplace_back(make(meta.toTensor()));
    } else if (meta.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : meta.toTensorVector()) list.push_back(make(tensor));
      results.emplace_back(std::move(list));
    } else {
      results.push_back(meta);
    }
  }
  auto on_cpu = std::make_shared<Stack>(std::move(arguments));
  replace(*on_cpu, 0,
          [&](const at::Tensor& tensor) {
            if (!tensor.defined()) return tensor;
            if (tensor.device().type() == kNpu) return alias_for_work(tensor, stream);
            return tensor.clone();  // The host may write to it before the work runs.
          },
          cpu_device);
  enqueue(stream, schema.name(), [op, on_cpu, targets] {
    at::AutoDispatchBelowADInplaceOrView guard;
    // Torch returns a pair of out-arguments as references into the stack that it has dropped: they
    // are good only while somebody else holds the tensors.
    const Stack held = *on_cpu;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), on_cpu.get());
    for (size_t i = 0; i < targets->size(); ++i) {
      const auto& made = (*targets)[i];
      if (made.empty()) continue;
      const auto& value = (*on_cpu)[i];
      if (value.isTensor()) {
        made[0].copy_(value.toTensor());
      } else {
        const auto tensors = value.toTensorVector();
        for (size_t j = 0; j < tensors.size(); ++j) made[j].copy_(tensors[j]);
      }
    }
  });
  torch::jit::drop(*stack, num_arguments);
  for (auto& result : results) stack->push_back(std::move(result));
  return true;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& schema = op.schema();
  count_operator(schema.name());
  check_devices(schema, *stack, stack->size() - schema.arguments().size());
  if (is_late() && !is_running_work()) {
    const auto kind = cached_kind_of(op);
    if (kind == Kind::kLate && run_late(op, stack)) return;
    if (kind != Kind::kView) synchronize_stream(current_stream());
  }
  run_at_once(op, stack);
}

}  // namespace
}  // namespace emulated_npu

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulated_npu::fallback>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
