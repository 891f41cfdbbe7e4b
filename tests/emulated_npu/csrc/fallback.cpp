// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Every operator of torch that has no kernel of its own for npu.
//
// It runs as the kernel for CPUs, on CPU tensors that share the memory: views stay views, in-place
// stays in-place. When it runs depends on what it returns:
//   - views, at the call: they are about shapes;
//   - tensors whose shapes follow from shapes: the kernel for meta tensors says how large they are,
//     they are allocated at the call, and the work is enqueued;
//   - numbers, and tensors whose shapes depend on values: the stream is waited for, as on a device.
#include "arguments.h"
#include "device.h"
#include "inference.h"
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

namespace emulated_npu {
namespace {

// Operators whose second argument, indices, may be on the host. Any may get numbers from there.
const std::unordered_set<std::string> kTakesHostIndices = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put",
};

constexpr int kNew = -1;

struct Traits {
  bool is_view = false;
  bool needs_values = false;
  bool takes_host_indices = false;
  bool is_inferred = false;           // has outputs, new or resized, whose shapes are to be found
  int generator = -1;                 // the argument
  std::vector<int> written_argument;  // by return; kNew if it is a tensor of its own
};

Traits make_traits(const c10::OperatorHandle& op) {
  Traits traits;
  const auto& schema = op.schema();
  traits.takes_host_indices = kTakesHostIndices.count(schema.name());
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") traits.generator = static_cast<int>(i);
    if (arguments[i].is_out()) traits.is_inferred = true;
  }
  for (const auto& returned : schema.returns()) {
    const auto* alias = returned.alias_info();
    int written = kNew;
    if (alias && !alias->isWrite()) traits.is_view = true;
    if (alias && alias->isWrite())
      for (size_t i = 0; i < arguments.size() && written == kNew; ++i)
        if (arguments[i].alias_info() && *arguments[i].alias_info() == *alias) written = static_cast<int>(i);
    traits.written_argument.push_back(written);
    const bool is_list = returned.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!is_list && !returned.type()->isSubtypeOf(*c10::TensorType::get())) traits.needs_values = true;
    if (written == kNew) traits.is_inferred = true;
  }
  if (traits.is_inferred && !op.hasKernelForDispatchKey(c10::DispatchKey::Meta) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
    traits.needs_values = true;
  return traits;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Traits> known;
  const auto* key = &op.schema();
  auto found = known.find(key);
  if (found == known.end()) found = known.emplace(key, make_traits(op)).first;
  return found->second;
}

// The device of the tensors, if they are on one.
std::optional<c10::Device> common_device(const std::string& name, const Traits& traits, const Stack& arguments) {
  std::optional<c10::Device> first, other;
  bool are_indices = false;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.device().is_cpu() && (tensor.dim() == 0 || are_indices))) return tensor;
    if (!first) first = tensor.device();
    else if (*first != tensor.device()) other = tensor.device();
    return tensor;
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    are_indices = traits.takes_host_indices && i == 1;
    with_tensors(arguments[i], see);
  }
  TORCH_CHECK(!other, "Expected all tensors to be on the same device, but found at least two devices, ", *first, " and ", *other, "! (", name,
              ", emulated)");
  return first && first->type() == kNpu ? first : std::nullopt;
}

// Random numbers are drawn when an operator is called, whenever it runs: as a device's generators do.
void fork_generator(const Traits& traits, Stack& arguments) {
  if (traits.generator < 0) return;
  auto& value = arguments[traits.generator];
  auto generator = value.isNone() ? at::detail::getDefaultCPUGenerator() : value.toGenerator();
  std::lock_guard lock(generator.mutex());
  value = at::detail::createCPUGenerator(at::check_generator<at::CPUGeneratorImpl>(generator)->random64());
}

// The arguments are held meanwhile: torch returns several tensors that it has written as references
// to arguments which it has dropped by then.
Stack run_on_cpu(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack stack = arguments;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack;
}

// ------------------------------------------------------------------ at the call

void run_now(const c10::OperatorHandle& op, const Traits& traits, Stack arguments, Stack* stack) {
  synchronize_current_stream();
  fork_generator(traits, arguments);
  CpuAliases aliases;
  Stack inputs;
  for (const auto& argument : arguments)
    inputs.push_back(on_device(with_tensors(argument, [&](const at::Tensor& tensor) { return aliases.of(tensor); }), c10::kCPU));
  const auto results = run_on_cpu(op, inputs);
  aliases.mirror_resized();
  for (size_t i = 0; i < results.size(); ++i) {
    const auto written = traits.written_argument[i];
    if (written != kNew) {
      stack->push_back(arguments[written]);
      continue;
    }
    stack->push_back(with_tensors(results[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      const auto origin = aliases.origin(tensor);
      return origin.defined() ? view_of(origin, tensor) : to_npu_now(tensor);
    }));
  }
}

void run_view(const c10::OperatorHandle& op, Stack arguments, Stack* stack) {
  CpuAliases aliases;
  Stack inputs;
  for (const auto& argument : arguments) inputs.push_back(with_tensors(argument, [&](const at::Tensor& tensor) { return aliases.of(tensor); }));
  for (const auto& result : run_on_cpu(op, inputs))
    stack->push_back(with_tensors(result, [&](const at::Tensor& tensor) {
      const auto origin = aliases.origin(tensor);
      TORCH_CHECK(origin.defined(), op.schema().name(), ": a view of no npu tensor (emulated)");
      return view_of(origin, tensor);
    }));
}

// ------------------------------------------------------------------ later

// Allocates what is returned, as the kernel for meta tensors says. False: that depends on values.
bool allocate_outputs(const c10::OperatorHandle& op, const Traits& traits, const Stack& arguments, Stack* outputs) {
  const auto& inferred = infer(op, traits.generator, arguments);
  if (!inferred.is_known) return false;
  size_t number = 0;
  for (const auto& argument : arguments)
    with_tensors(argument, [&](const at::Tensor& tensor) {
      const auto& sizes = inferred.resized[number++];
      if (sizes) tensor.resize_(*sizes);
      return tensor;
    });
  for (size_t i = 0; i < inferred.returned.size(); ++i) {
    const auto written = traits.written_argument[i];
    outputs->push_back(written != kNew ? arguments[written] : with_tensors(inferred.returned[i], [](const at::Tensor& meta) {
      return meta.defined() ? new_npu_tensor(meta.sizes(), meta.strides(), meta.scalar_type()) : meta;
    }));
  }
  return true;
}

void deliver(const std::string& name, const c10::IValue& output, const c10::IValue& result) {
  std::vector<at::Tensor> to, from;
  with_tensors(output, [&](const at::Tensor& tensor) { return to.emplace_back(tensor); });
  with_tensors(result, [&](const at::Tensor& tensor) { return from.emplace_back(tensor); });
  TORCH_CHECK(to.size() == from.size(), name, ": ", from.size(), " results instead of ", to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    if (!to[i].defined()) continue;
    TORCH_CHECK(to[i].sizes() == from[i].sizes() && to[i].dtype() == from[i].dtype(), name, ": result of shape ", from[i].sizes(),
                " and type ", from[i].dtype(), ", but its kernel for meta tensors has said ", to[i].sizes(), " and ", to[i].dtype());
    copy_bytes(to[i], from[i]);
  }
}

void run_later(const c10::OperatorHandle& op, const Traits& traits, Stack arguments, const Stack& outputs) {
  fork_generator(traits, arguments);
  CpuAliases aliases;
  Stack inputs, results;
  for (const auto& argument : arguments)
    inputs.push_back(on_device(with_tensors(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || is_npu(tensor)) return aliases.of(tensor);
      auto copy = tensor.clone();  // the host's values are taken at the call
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }), c10::kCPU));
  for (size_t i = 0; i < outputs.size(); ++i)
    results.push_back(traits.written_argument[i] == kNew ? with_tensors(outputs[i], [&](const at::Tensor& tensor) { return aliases.of(tensor); })
                                                         : c10::IValue());
  const auto& name = op.schema().name();
  enqueue(name, [op, name, inputs = std::move(inputs), results = std::move(results)] {
    const auto made = run_on_cpu(op, inputs);
    for (size_t i = 0; i < results.size(); ++i)
      if (!results[i].isNone()) deliver(name, results[i], made[i]);
  });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& traits = traits_of(op);
  const auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  Stack arguments(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
  stack->erase(first, stack->end());
  OnDevice on(common_device(op.schema().name(), traits, arguments));
  if (traits.is_view) return run_view(op, std::move(arguments), stack);
  auto& scheduler = Scheduler::get();
  const bool is_queued = scheduler.is_late() || scheduler.recorder_of(scheduler.current_stream(current_device()));
  if (traits.needs_values || !is_queued) return run_now(op, traits, std::move(arguments), stack);
  Stack outputs;
  if (!traits.is_inferred) {
    for (const auto written : traits.written_argument) outputs.push_back(arguments[written]);
  } else if (!allocate_outputs(op, traits, arguments, &outputs)) {
    return run_now(op, traits, std::move(arguments), stack);
  }
  run_later(op, traits, std::move(arguments), outputs);
  for (auto& output : outputs) stack->push_back(std::move(output));
}

// Torch composes operators that have a kernel for results in given tensors, for any device: sizes,
// allocation, that kernel. Here they are taken as one, which costs half.
void take_composed(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace
}  // namespace emulated_npu

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulated_npu::fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { emulated_npu::take_composed(m); }
