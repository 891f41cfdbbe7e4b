// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "graphs.h"

#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>

namespace emulated_npu {
namespace {

std::atomic<uint64_t> capture_clock{0};
std::atomic<uint64_t> replay_count{0};

// The memory of all graphs, by pool, in the order of their captures.
std::mutex graph_memory_mutex;

std::vector<std::weak_ptr<GraphMemory>>& all_graph_memory() {
  static auto* all = new std::vector<std::weak_ptr<GraphMemory>>;
  return *all;
}

c10::Stream current_stream() { return Scheduler::get().current_stream(current_device()); }

// Work that can be copied cheaply, and run many times.
Task repeatable(Task task) {
  if (!task.run) return task;
  auto run = std::make_shared<std::function<void()>>(std::move(task.run));
  task.run = [run] { (*run)(); };
  return task;
}

Task poison_of(const BlockPtr& block) {
  return {"poison of a graph's memory", [block] { block->poison(); }, nullptr, nullptr};
}

}  // namespace

void note_freed(const BlockPtr& block) {
  block->freed_at = ++capture_clock;
  if (const auto recorder = Scheduler::get().recorder_of(block->stream)) recorder->note_freed(block);
}

// ------------------------------------------------------------------ task groups

void TaskGroup::add(Task task) {
  TORCH_CHECK(!task.waits_for && !task.reaches, "npu: a task group has work only, and no event");
  std::lock_guard lock(mutex_);
  tasks_.push_back(repeatable(std::move(task)));
}

void TaskGroup::run() const {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks = tasks_;
  }
  for (const auto& task : tasks)
    if (task.run) task.run();
}

void TaskGroup::check_replaceable_by(const TaskGroup& other) const {
  std::scoped_lock lock(mutex_, other.mutex_);
  const auto is_same_kind = [](const Task& first, const Task& second) { return first.name == second.name; };
  TORCH_CHECK(std::equal(tasks_.begin(), tasks_.end(), other.tasks_.begin(), other.tasks_.end(), is_same_kind),
              "npu: an update of a task group has other work than the group: ", other.tasks_.size(), " tasks instead of ",
              tasks_.size(), ", or others");
}

void TaskGroup::take(TaskGroup& other) {
  std::vector<Task> tasks = other.tasks_;
  std::lock_guard lock(mutex_);
  tasks_.swap(tasks);
}

// ------------------------------------------------------------------ external events

void ExternalEvent::record(c10::Stream stream) {
  marker_->stream = stream;
  Scheduler::get().enqueue(stream, {"record of an external event", {}, nullptr, marker_});
}

void ExternalEvent::wait(c10::Stream stream) {
  Scheduler::get().enqueue(stream, {"wait for an external event", {}, marker_, nullptr});
}

void ExternalEvent::reset(c10::Stream stream) {
  Scheduler::get().enqueue(stream, {"reset of an external event", [marker = marker_] { marker->is_reached = false; }, nullptr, nullptr});
}

// ------------------------------------------------------------------ captures

class Capture final : public Recorder {
 public:
  Capture(c10::Stream stream, int64_t pool) : streams_{stream}, memory_(std::make_shared<GraphMemory>()) {
    memory_->pool = pool;
    memory_->began_at = ++capture_clock;
    std::lock_guard lock(graph_memory_mutex);
    auto& all = all_graph_memory();
    all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }), all.end());
    all.push_back(memory_);
  }

  bool takes(c10::Stream stream) const override {
    std::lock_guard lock(mutex_);
    return find(stream) < streams_.size();
  }

  void add(c10::Stream stream, Task task) override {
    std::lock_guard lock(mutex_);
    const auto index = find(stream);
    if (group_ && index == group_stream_) return group_->add(std::move(task));
    nodes_.push_back({index, repeatable(std::move(task))});
  }

  bool add_wait(c10::Stream stream, const MarkerPtr& marker) override {
    const bool is_recorded_here = marker->recorded_in == number;
    if (takes(stream) && !is_recorded_here) refuse("a captured stream waits for an event that was recorded outside of the capture");
    if (!is_recorded_here) return false;
    {
      std::lock_guard lock(mutex_);
      if (find(stream) == streams_.size()) streams_.push_back(stream);
    }
    add(stream, {"wait", {}, marker, nullptr});
    return true;
  }

  std::shared_ptr<GraphMemory> memory() const override { return memory_; }

  // What the capture has dropped before may be what it gets now.
  void note_allocated(const BlockPtr& block) override {
    {
      std::lock_guard lock(mutex_);
      auto& nodes = group_ ? behind_group_ : nodes_;
      for (const auto& freed : freed_) nodes.push_back({find(freed->stream), repeatable(poison_of(freed))});
      freed_.clear();
    }
    std::lock_guard lock(memory_->mutex);
    memory_->blocks.push_back(block);
  }

  // What others have made known with record_stream is not given away before the capture ends.
  void note_freed(const BlockPtr& block) override {
    if (block->graph->pool != memory_->pool || !block->used_on.empty()) return;
    std::lock_guard lock(mutex_);
    freed_.push_back(block);
  }

  void refuse(const std::string& what) override {
    {
      std::lock_guard lock(mutex_);
      if (refused_.empty()) refused_ = what;
    }
    TORCH_CHECK(false, "npu: not permitted during a capture: ", what);
  }

  void begin_group(c10::Stream stream) {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(!group_, "npu: graph_task_group_begin in a task group");
    group_ = std::make_shared<TaskGroup>();
    group_stream_ = find(stream);
  }

  TaskGroupPtr end_group() {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(group_, "npu: graph_task_group_end without graph_task_group_begin");
    nodes_.push_back({group_stream_, {"task group", [group = group_] { group->run(); }, nullptr, nullptr}});
    for (auto& node : behind_group_) nodes_.push_back(std::move(node));
    behind_group_.clear();
    auto group = std::move(group_);
    group_ = nullptr;
    return group;
  }

  c10::Stream stream() const { return streams_.front(); }

  void check_can_end() const {
    TORCH_CHECK(refused_.empty(), "npu: the capture is not valid, because ", refused_);
    TORCH_CHECK(!group_, "npu: the capture ends in a task group");
    const auto unjoined = first_unjoined();
    TORCH_CHECK(unjoined == nodes_.size(), "npu: the capture ends with work of another stream that the captured one does not wait for: ",
                unjoined < nodes_.size() ? nodes_[unjoined].task.name : "");
  }

  void give_to(Graph& graph) {
    graph.streams_ = streams_;
    graph.nodes_ = std::move(nodes_);
    graph.memory_ = memory_;
    for (size_t i = 1; i < streams_.size(); ++i) graph.streams_[i] = Scheduler::get().new_stream(streams_[i].device());
  }

 private:
  using Node = Graph::Node;

  size_t find(c10::Stream stream) const {
    return static_cast<size_t>(std::find(streams_.begin(), streams_.end(), stream) - streams_.begin());
  }

  // The first work from which no chain of waits leads to the end of the first stream; else their number.
  size_t first_unjoined() const {
    std::vector<bool> is_waited_for(streams_.size());
    std::set<const Marker*> awaited;
    is_waited_for[0] = true;
    size_t first = nodes_.size();
    for (size_t i = nodes_.size(); i-- > 0;) {
      const auto& [stream, task] = nodes_[i];
      if (task.reaches && awaited.count(task.reaches.get())) is_waited_for[stream] = true;
      if (is_waited_for[stream]) {
        if (task.waits_for) awaited.insert(task.waits_for.get());
      } else if (task.run) {
        first = i;
      }
    }
    return first;
  }

  mutable std::mutex mutex_;
  std::vector<c10::Stream> streams_;
  std::vector<Node> nodes_;
  std::vector<Node> behind_group_;
  std::vector<BlockPtr> freed_;  // since the last allocation
  TaskGroupPtr group_;
  size_t group_stream_ = 0;
  std::shared_ptr<GraphMemory> memory_;
  std::string refused_;
};

// ------------------------------------------------------------------ graphs

Graph::~Graph() {
  if (capture_) Scheduler::get().end_recording();
}

void Graph::begin(int64_t pool) {
  const auto stream = current_stream();
  TORCH_CHECK(!capture_ && !is_captured_, "npu: this graph has been captured; it can be reset");
  TORCH_CHECK(stream.id() != 0, "npu: a capture needs another stream than the default one");
  auto capture = std::make_shared<Capture>(stream, pool);
  Scheduler::get().begin_recording(capture);
  capture_ = std::move(capture);
}

void Graph::end() {
  TORCH_CHECK(capture_, "npu: capture_end without capture_begin");
  auto capture = std::move(capture_);
  capture_ = nullptr;
  Scheduler::get().end_recording();
  TORCH_CHECK(current_stream() == capture->stream(), "npu: the capture ends on another stream than it began on");
  capture->check_can_end();
  capture->give_to(*this);
  is_captured_ = true;
}

// Memory that was free when a capture began, or was freed in it, may be that graph's. So a replay
// overwrites what earlier graphs of the pool had dropped by then; and what it drops itself, any later
// graph of the pool may have, in use or not.
void Graph::queue_clobbering(c10::Stream stream) const {
  std::vector<BlockPtr> clobbered;
  {
    std::lock_guard lock(graph_memory_mutex);
    for (const auto& one : all_graph_memory()) {
      const auto other = one.lock();
      if (!other || other == memory_ || other->pool != memory_->pool) continue;
      const bool is_later = other->began_at > memory_->began_at;
      std::lock_guard blocks_lock(other->mutex);
      for (const auto& weak : other->blocks) {
        auto block = weak.lock();
        const bool was_free = block && block->freed_at && block->freed_at < memory_->began_at;
        if (block && (is_later || was_free)) clobbered.push_back(std::move(block));
      }
    }
  }
  if (clobbered.empty()) return;
  Scheduler::get().append(stream, {"poison of memory that graphs share", [clobbered = std::move(clobbered)] {
    for (const auto& block : clobbered) block->poison();
  }, nullptr, nullptr});
}

void Graph::replay() {
  auto& scheduler = Scheduler::get();
  const auto stream = current_stream();
  TORCH_CHECK(is_captured_, "npu: replay of a graph that was not captured");
  if (const auto recorder = scheduler.recorder_of(stream)) recorder->refuse("a graph is replayed");
  if (replayed_) scheduler.wait(stream, replayed_);
  queue_clobbering(stream);
  auto streams = streams_;
  streams[0] = stream;
  std::unordered_map<const Marker*, MarkerPtr> markers;
  const auto of_this_replay = [&](const MarkerPtr& marker, c10::Stream of) {
    if (!marker || !marker->recorded_in) return marker;
    auto& mine = markers[marker.get()];
    if (!mine) {
      mine = std::make_shared<Marker>();
      mine->stream = of;
    }
    return mine;
  };
  for (const auto& node : nodes_) {
    auto task = node.task;
    task.reaches = of_this_replay(task.reaches, streams[node.stream]);
    task.waits_for = of_this_replay(task.waits_for, streams[node.stream]);
    scheduler.append(streams[node.stream], std::move(task));
  }
  ++replay_count;
  replayed_ = scheduler.record(stream);
}

void Graph::reset() {
  TORCH_CHECK(!capture_, "npu: reset of a graph during its capture");
  is_captured_ = false;
  nodes_.clear();
  memory_ = nullptr;
}

int64_t Graph::pool() const {
  TORCH_CHECK(memory_, "npu: the pool of a graph that was not captured");
  return memory_->pool;
}

int64_t new_graph_pool() {
  static std::atomic<int64_t> count{0};
  return ++count;
}

bool is_capturing(c10::Stream stream) {
  const auto recorder = Scheduler::get().recorder_of(stream);
  return recorder && recorder->memory();
}

uint64_t num_replays() { return replay_count; }

// ------------------------------------------------------------------ groups and their updates

namespace {

std::shared_ptr<Capture> capture_of(c10::Stream stream) {
  auto capture = std::dynamic_pointer_cast<Capture>(Scheduler::get().recorder_of(stream));
  TORCH_CHECK(capture, "npu: a task group on a stream that is not captured");
  return capture;
}

class Update final : public Recorder {
 public:
  Update(c10::Stream stream, TaskGroupPtr group) : stream_(stream), group_(std::move(group)) {}

  bool takes(c10::Stream stream) const override { return stream == stream_; }
  void add(c10::Stream, Task task) override { changed_->add(std::move(task)); }
  bool add_wait(c10::Stream stream, const MarkerPtr&) override {
    if (takes(stream)) refuse("the stream waits for an event");
    return false;
  }
  void refuse(const std::string& what) override { TORCH_CHECK(false, "npu: not permitted during an update of a task group: ", what); }

  Task task() const {
    group_->check_replaceable_by(*changed_);
    return {"update of a task group", [group = group_, changed = changed_] { group->take(*changed); }, nullptr, nullptr};
  }

 private:
  c10::Stream stream_;
  TaskGroupPtr group_;
  TaskGroupPtr changed_ = std::make_shared<TaskGroup>();
};

}  // namespace

void begin_task_group(c10::Stream stream) { capture_of(stream)->begin_group(stream); }

TaskGroupPtr end_task_group(c10::Stream stream) { return capture_of(stream)->end_group(); }

void begin_update(c10::Stream stream, TaskGroupPtr group) {
  TORCH_CHECK(!is_capturing(stream), "npu: an update of a task group on a stream that is captured");
  Scheduler::get().begin_recording(std::make_shared<Update>(stream, std::move(group)));
}

void end_update(c10::Stream stream) {
  const auto update = std::dynamic_pointer_cast<Update>(Scheduler::get().recorder_of(stream));
  TORCH_CHECK(update, "npu: graph_task_update_end without graph_task_update_begin");
  Scheduler::get().end_recording();
  Scheduler::get().enqueue(stream, update->task());
}

}  // namespace emulated_npu
