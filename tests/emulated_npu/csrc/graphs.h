// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Graphs: work that a stream was given once, and is given again.
//
// While a stream is captured, its work is recorded in the place where it would be queued. Streams that
// wait for an event of the capture are captured, too. A replay queues the recorded work: that of the
// first stream on the replaying one, that of others on streams of the graph. So a replay is late as any
// work, and its waits and records are those of the capture, with markers of this replay.
//
// What a capture allocates is its graph's, and lives as long as the graph. A tensor that the
// capture has dropped is poisoned where it has allocated the next one, which may have got the memory.
// Graphs with one pool share memory, too: see Graph::queue_clobbering.
#pragma once

#include "memory.h"

#include <set>

namespace emulated_npu {

// The blocks of one graph, and when its capture was, by a clock of all captures.
struct GraphMemory {
  std::mutex mutex;
  std::vector<std::weak_ptr<Block>> blocks;
  int64_t pool = 0;
  uint64_t began_at = 0;
};

// Of a block that a graph owns: its last tensor is gone.
void note_freed(const BlockPtr& block);

// Work whose parameters can be replaced while its graph exists. A replay does what the group has when
// the stream comes to it.
class TaskGroup {
 public:
  void add(Task task);
  void run() const;
  // Raises unless the work is of the same kinds, in the same order.
  void check_replaceable_by(const TaskGroup& other) const;
  void take(TaskGroup& other);

 private:
  mutable std::mutex mutex_;
  std::vector<Task> tasks_;
};
using TaskGroupPtr = std::shared_ptr<TaskGroup>;

// An event that is outside of a graph: a wait in the graph is for the next record, whoever makes it,
// until a reset.
class ExternalEvent {
 public:
  void record(c10::Stream stream);
  void wait(c10::Stream stream);
  void reset(c10::Stream stream);

 private:
  MarkerPtr marker_ = std::make_shared<Marker>();
};

class Capture;

class Graph {
 public:
  ~Graph();

  // Of the current stream.
  void begin(int64_t pool);
  // Raises: something was refused since, or another stream has work that the first one did not wait for.
  void end();
  // On the current stream, after the replay before.
  void replay();
  void reset();
  int64_t pool() const;

 private:
  struct Node {
    size_t stream;
    Task task;
  };
  friend class Capture;

  void queue_clobbering(c10::Stream stream) const;

  std::shared_ptr<Capture> capture_;
  bool is_captured_ = false;
  std::vector<c10::Stream> streams_;
  std::vector<Node> nodes_;
  std::shared_ptr<GraphMemory> memory_;
  MarkerPtr replayed_;
};

int64_t new_graph_pool();
bool is_capturing(c10::Stream stream);
uint64_t num_replays();

void begin_task_group(c10::Stream stream);
TaskGroupPtr end_task_group(c10::Stream stream);
// What a stream is given until the end replaces the group's work when the stream comes to it.
void begin_update(c10::Stream stream, TaskGroupPtr group);
void end_update(c10::Stream stream);

}  // namespace emulated_npu
