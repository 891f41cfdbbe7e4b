// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "streams.h"

#include <Python.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <cmath>

namespace emulated_npu {
namespace {

constexpr size_t kMaxPending = 20000;  // a device's queues are not endless either
constexpr uint64_t kPhaseTasks = 128;   // a stream is slow, or work runs at once, for so long
constexpr std::array<double, 5> kEagerness = {0, 0, 0.03, 0.3, 1};
constexpr std::array<double, 4> kUrgency = {1, 1, 0.8, 0.2};
constexpr uint64_t kSlowest = 7;  // a slow stream has the weight 2^-6

thread_local int task_depth = 0;
thread_local std::map<c10::DeviceIndex, c10::Stream> current_streams;

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

uint64_t mixed(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kNpu, device));
}

// What holds while a task runs: there is no autograd on the device, and no call back to it.
struct TaskScope {
  c10::InferenceMode inference_mode;
  TaskScope() { ++task_depth; }
  ~TaskScope() { --task_depth; }
};

void reach(const MarkerPtr& marker) {
  if (!marker) return;
  marker->time_s = now_s();
  marker->is_reached = true;
}

}  // namespace

enum class Scheduler::Draw : uint64_t { kWeight, kRace, kUrgency, kUrgent, kEagerness, kEager, kCount, kFurther };

Recorder::Recorder() : number([] {
    static std::atomic<uint64_t> count{0};
    return ++count;
  }()) {}

bool is_in_task() { return task_depth > 0; }

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Scheduler& Scheduler::get() {
  static auto* scheduler = new Scheduler;  // outlives every thread
  return *scheduler;
}

void Scheduler::seed(std::optional<uint64_t> seed) {
  synchronize_device();
  std::lock_guard lock(queues_);
  seed_ = seed.value_or(0);
  is_late_ = seed.has_value();
  // The same draws again for who has made no new streams since.
  for (auto& [key, queue] : by_stream_) {
    queue->num_before_seed = queue->num_finished;
    queue->num_queries = 0;
  }
  num_transient_ = 0;
}

// ------------------------------------------------------------------ streams

c10::Stream Scheduler::new_stream(c10::Device device) {
  std::lock_guard lock(queues_);
  return c10::Stream(c10::Stream::UNSAFE, device, ++num_streams_);
}

c10::Stream Scheduler::current_stream(c10::DeviceIndex device) const {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? default_stream(device) : found->second;
}

c10::Stream Scheduler::exchange_current_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  current_streams.insert_or_assign(stream.device_index(), stream);
  return before;
}

Scheduler::Queue& Scheduler::queue_of(c10::Stream stream) {
  auto& queue = by_stream_[{stream.device_index(), stream.id()}];
  if (!queue) queue.reset(new Queue{stream.id(), false});
  return *queue;
}

void Scheduler::append(c10::Stream stream, Task task) {
  std::lock_guard lock(queues_);
  auto& queue = queue_of(stream);
  ++queue.num_appended;
  ++num_queued_;
  queue.tasks.push_back(std::move(task));
}

void Scheduler::append_after(std::vector<MarkerPtr> markers, Task task) {
  std::lock_guard lock(queues_);
  transient_.emplace_back(new Queue{--num_transient_, true});
  auto& queue = *transient_.back();
  queue.num_appended = markers.size() + 1;
  num_queued_ += markers.size() + 1;
  for (auto& marker : markers) queue.tasks.push_back({"wait", {}, std::move(marker), nullptr});
  queue.tasks.push_back(std::move(task));
}

void Scheduler::enqueue(c10::Stream stream, Task task) {
  TORCH_CHECK(!is_in_task(), task.name, ": work on the emulated NPU cannot enqueue work. A kernel's body takes CPU tensors only.");
  if (const auto recorder = recorder_of(stream)) return recorder->add(stream, std::move(task));
  if (!is_late_) return run_at_once(stream, std::move(task));
  uint64_t count = 0;
  {
    std::lock_guard lock(queues_);
    auto& queue = queue_of(stream);
    const auto sequence = queue.num_appended++ - queue.num_before_seed;
    ++num_queued_;
    queue.tasks.push_back(std::move(task));
    const auto phase = sequence / kPhaseTasks;
    const auto eagerness = kEagerness[draw(queue, phase, Draw::kEagerness) % kEagerness.size()];
    if (draw_share(queue, sequence, Draw::kEager) < eagerness)
      count = 1 + draw(queue, sequence, Draw::kCount) % 16;
    if (queue.tasks.size() > kMaxPending) count = kMaxPending / 2;
  }
  if (count) run_some(count);
}

void Scheduler::run_at_once(c10::Stream stream, Task task) {
  if (!num_queued_ && (!task.waits_for || task.waits_for->is_reached)) {
    TaskScope scope;
    if (task.run) task.run();
    reach(task.reaches);
    return;
  }
  append(stream, std::move(task));
  {
    WithoutGil without_gil;
    while (run_one(nullptr)) {}
  }
  raise_failure();
}

// ------------------------------------------------------------------ events

MarkerPtr Scheduler::record(c10::Stream stream) {
  auto marker = std::make_shared<Marker>();
  marker->stream = stream;
  if (const auto recorder = recorder_of(stream)) marker->recorded_in = recorder->number;
  enqueue(stream, {"record", {}, nullptr, marker});
  return marker;
}

void Scheduler::wait(c10::Stream stream, const MarkerPtr& marker) {
  if (!marker) return;
  if (const auto recorder = this->recorder())
    if (recorder->add_wait(stream, marker)) return;
  refuse_if_recorded(marker, "a stream waits for it");
  if (!marker->is_reached) enqueue(stream, {"wait", {}, marker, nullptr});
}

// ------------------------------------------------------------------ recording

void Scheduler::begin_recording(RecorderPtr recorder) {
  std::lock_guard lock(recorders_);
  TORCH_CHECK(!recorder_, "npu: a second capture or update at the same time is not emulated");
  recorder_ = std::move(recorder);
  is_recording_ = true;
}

void Scheduler::end_recording() {
  RecorderPtr ended;  // what it holds goes without the lock
  std::lock_guard lock(recorders_);
  ended.swap(recorder_);
  is_recording_ = false;
}

RecorderPtr Scheduler::recorder() const {
  if (!is_recording_) return nullptr;
  std::lock_guard lock(recorders_);
  return recorder_;
}

RecorderPtr Scheduler::recorder_of(c10::Stream stream) const {
  auto recorder = this->recorder();
  return recorder && recorder->takes(stream) ? recorder : nullptr;
}

void Scheduler::refuse_while_recorded(c10::Stream stream, const char* what) const {
  if (const auto recorder = recorder_of(stream)) recorder->refuse(what);
}

void Scheduler::refuse_if_recorded(const MarkerPtr& marker, const char* what) const {
  if (!marker || !marker->recorded_in) return;
  const auto recorder = this->recorder();
  if (recorder && recorder->number == marker->recorded_in) recorder->refuse(what);
  TORCH_CHECK(false, "npu: the event was recorded in a capture, and ", what);
}

// ------------------------------------------------------------------ what runs next

uint64_t Scheduler::draw(const Queue& queue, uint64_t sequence, Draw purpose) const {
  const auto place = mixed(static_cast<uint64_t>(queue.id)) ^ mixed(sequence * 16 + static_cast<uint64_t>(purpose));
  return mixed(mixed(seed_) ^ place);
}

double Scheduler::draw_share(const Queue& queue, uint64_t sequence, Draw purpose) const {
  return static_cast<double>(draw(queue, sequence, purpose) >> 11) * 0x1p-53;
}

bool Scheduler::is_runnable(const Queue& queue) {
  if (queue.tasks.empty() || queue.is_running) return false;
  const auto& marker = queue.tasks.front().waits_for;
  return !marker || marker->is_reached;
}

// What has to run first so that this one gets on.
Scheduler::Queue* Scheduler::next_towards(Queue* queue) {
  // Streams that wait for each other until an external event comes go in circles.
  for (size_t steps = by_stream_.size() + 1; steps && !queue->tasks.empty() && !queue->is_running; --steps) {
    const auto& marker = queue->tasks.front().waits_for;
    if (!marker || marker->is_reached) return queue;
    queue = &queue_of(marker->stream);
  }
  return nullptr;
}

// A race in which slow streams have a small chance.
Scheduler::Queue* Scheduler::next_of_all() {
  Queue* first = nullptr;
  double least = 0;
  auto enter = [&](Queue& queue) {
    if (!is_runnable(queue)) return;
    const auto slowness = draw(queue, queue.head() / kPhaseTasks, Draw::kWeight) % kSlowest;
    const auto time = -std::log1p(-draw_share(queue, queue.head(), Draw::kRace)) * std::exp2(slowness);
    if (first && time >= least) return;
    first = &queue;
    least = time;
  };
  for (auto& [key, queue] : by_stream_) enter(*queue);
  for (auto& queue : transient_) enter(*queue);
  return first;
}

Scheduler::Queue* Scheduler::next(Queue* wanted) {
  auto* towards = wanted ? next_towards(wanted) : nullptr;
  if (!towards) return next_of_all();
  const auto phase = towards->head() / kPhaseTasks;
  const auto urgency = kUrgency[draw(*towards, phase, Draw::kUrgency) % kUrgency.size()];
  if (draw_share(*towards, towards->head(), Draw::kUrgent) < urgency) return towards;
  return next_of_all();
}

// ------------------------------------------------------------------ running

bool Scheduler::run_one(Queue* wanted) {
  std::unique_lock running(running_);
  Task task;
  Queue* queue;
  {
    std::lock_guard lock(queues_);
    queue = next(wanted);
    if (!queue) return false;
    task = std::move(queue->tasks.front());
    queue->tasks.pop_front();
    queue->is_running = true;
  }
  execute(task, queue->id);
  std::lock_guard lock(queues_);
  queue->is_running = false;
  --num_queued_;
  ++queue->num_finished;
  if (queue->is_transient && queue->tasks.empty())
    for (auto one = transient_.begin(); one != transient_.end(); ++one)
      if (one->get() == queue) {
        transient_.erase(one);
        break;
      }
  return true;
}

void Scheduler::execute(Task& task, int64_t stream) {
  try {
    TaskScope scope;
    if (task.run) task.run();
    task.run = nullptr;  // what it holds goes in here, and not under a lock
  } catch (const std::exception& error) {
    std::lock_guard lock(queues_);
    if (!has_failed_)
      failure_ = c10::str("npu: ", task.name, " on stream ", stream, " failed when it ran (seed ", seed_, "): ", error.what());
    has_failed_ = true;
  }
  reach(task.reaches);
}

void Scheduler::run_some(uint64_t count) {
  WithoutGil without_gil;
  std::unique_lock running(running_, std::try_to_lock);
  if (!running) return;  // another thread makes the device busy
  while (count-- && run_one(nullptr)) {}
}

void Scheduler::run_until(Queue* wanted, const std::function<bool()>& is_done) {
  TORCH_CHECK(!is_in_task(), "npu: a kernel's body waits for the device. It takes CPU tensors only.");
  if (is_late_ || num_queued_) {
    WithoutGil without_gil;
    while (!is_done())
      TORCH_CHECK(run_one(wanted) || is_done(), "npu: nothing can run, and somebody waits (seed ", seed_, ")");
    uint64_t further = 0;
    if (wanted) {
      std::lock_guard lock(queues_);
      if (draw(*wanted, wanted->head(), Draw::kFurther) % 4 == 0) further = draw(*wanted, wanted->head(), Draw::kCount) % 32;
    }
    while (further-- && run_one(nullptr)) {}
  }
  raise_failure();
}

void Scheduler::raise_failure() {
  if (!has_failed_) return;
  std::string failure;
  {
    std::lock_guard lock(queues_);
    failure.swap(failure_);
    has_failed_ = false;
  }
  TORCH_CHECK(failure.empty(), failure);
}

// ------------------------------------------------------------------ waiting

void Scheduler::synchronize(c10::Stream stream) {
  refuse_while_recorded(stream, "the host waits for its stream");
  Queue* queue;
  uint64_t end;
  {
    std::lock_guard lock(queues_);
    queue = &queue_of(stream);
    end = queue->num_appended;
  }
  run_until(queue, [this, queue, end] {
    std::lock_guard lock(queues_);
    return queue->num_finished >= end;
  });
}

void Scheduler::synchronize(const MarkerPtr& marker) {
  if (!marker) return;
  refuse_if_recorded(marker, "the host waits for it");
  Queue* queue;
  {
    std::lock_guard lock(queues_);
    queue = &queue_of(marker->stream);
  }
  run_until(queue, [&marker] { return marker->is_reached.load(); });
}

void Scheduler::synchronize_device() {
  const auto recorder = this->recorder();
  if (recorder && recorder->memory()) recorder->refuse("the host waits for the device");  // a capture, of whatever thread
  run_until(nullptr, [this] { return num_pending() == 0; });
}

bool Scheduler::query(c10::Stream stream) {
  refuse_while_recorded(stream, "the host asks whether its stream is done");
  uint64_t count = 0;
  {
    std::lock_guard lock(queues_);
    auto& queue = queue_of(stream);
    if (queue.num_finished == queue.num_appended) return true;
    count = draw(queue, ++queue.num_queries, Draw::kCount) % 8;
  }
  if (count) run_some(count);
  std::lock_guard lock(queues_);
  auto& queue = queue_of(stream);
  return queue.num_finished == queue.num_appended;
}

bool Scheduler::query(const MarkerPtr& marker) {
  refuse_if_recorded(marker, "the host asks whether it has passed");
  if (!marker || marker->is_reached) return true;
  query(marker->stream);
  return marker->is_reached;
}

size_t Scheduler::num_pending() {
  std::lock_guard lock(queues_);
  size_t count = 0;
  for (auto& [key, queue] : by_stream_) count += queue->tasks.size() + queue->is_running;
  for (auto& queue : transient_) count += queue->tasks.size() + queue->is_running;
  return count;
}

}  // namespace emulated_npu
