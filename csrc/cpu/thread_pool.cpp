// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvext {
namespace {

// Lives on the caller's stack. Counts are guarded by the pool's mutex.
struct Job {
  const std::function<void(int64_t)>& task;
  const int64_t num_tasks;
  int num_helpers_missing;
  int num_helpers_active = 0;
  std::atomic<int64_t> next_task{0};

  void work() {
    for (;;) {
      const int64_t index = next_task.fetch_add(1, std::memory_order_relaxed);
      if (index >= num_tasks) return;
      task(index);
    }
  }
};

class Pool {
 public:
  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      start_threads(job.num_helpers_missing);
      jobs_.push_back(&job);
    }
    has_job_.notify_all();
    job.work();
    std::unique_lock lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    helper_left_.wait(lock, [&job] { return job.num_helpers_active == 0; });
  }

 private:
  void start_threads(int num_wanted) {
    // Signals belong to the threads that Python knows.
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    try {
      for (; num_threads_ < num_wanted; ++num_threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // No more threads to be had: the caller does what they would have done.
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_job_.wait(lock, [this] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      if (--job.num_helpers_missing == 0) jobs_.pop_front();
      ++job.num_helpers_active;
      lock.unlock();
      job.work();
      lock.lock();
      if (--job.num_helpers_active == 0) helper_left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_job_;
  std::condition_variable helper_left_;
  std::deque<Job*> jobs_;
  int num_threads_ = 0;
};

// Never destroyed: threads may sleep in it when the process ends.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  static const bool is_prepared = [] {
    current_pool = new Pool;
    // A forked child has none of the threads, and perhaps a mutex that one of them held.
    pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool; });
    return true;
  }();
  (void)is_prepared;
  return *current_pool;
}

}  // namespace

void run_tasks(int num_threads, int64_t num_tasks, const std::function<void(int64_t)>& task) {
  const int64_t num_useful = std::min<int64_t>(num_threads, num_tasks);
  Job job{task, num_tasks, static_cast<int>(num_useful - 1)};
  if (num_useful <= 1) {
    job.work();
  } else {
    pool().run(job);
  }
}

}  // namespace kvext
