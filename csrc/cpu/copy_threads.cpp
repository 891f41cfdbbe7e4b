// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "copy_threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

namespace kvext {
namespace {

cpu_set_t set_of(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  return set;
}

// Binds the calling thread to the CPUs; returns the CPUs that the kernel did not give.
std::vector<int> bind_to(const std::vector<int>& cpus) {
  const cpu_set_t wanted = set_of(cpus);
  if (pthread_setaffinity_np(pthread_self(), sizeof(wanted), &wanted) != 0) return cpus;
  cpu_set_t found;
  if (pthread_getaffinity_np(pthread_self(), sizeof(found), &found) != 0) return cpus;
  std::vector<int> missing;
  for (const int cpu : cpus) {
    if (!CPU_ISSET(cpu, &found)) missing.push_back(cpu);
  }
  return missing;
}

// Binds the calling thread to the CPUs, unless it is bound to just these. If the kernel refuses, the
// thread runs on where it is.
void stay_on(const cpu_set_t& cpus) {
  cpu_set_t found;
  const bool is_known = pthread_getaffinity_np(pthread_self(), sizeof(found), &found) == 0;
  if (is_known && CPU_EQUAL(&found, &cpus)) return;
  pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);
}

// Returns whether the calling thread already has the CPUs and the priority of the placement.
bool is_caller_placed(const Placement& placement) {
  if (placement.niceness != 0) return false;
  if (placement.cpus.empty()) return true;
  cpu_set_t found;
  if (pthread_getaffinity_np(pthread_self(), sizeof(found), &found) != 0) return false;
  const cpu_set_t allowed = set_of(placement.cpus);
  cpu_set_t both;
  CPU_AND(&both, &found, &allowed);
  return CPU_EQUAL(&both, &found);
}

// A job lives on the caller's stack. The team's mutex guards its counts.
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

// The threads of one placement.
class Team {
 public:
  explicit Team(const Placement& placement) : placement_(placement) {}

  const Placement& placement() const { return placement_; }

  void require_cpus() {
    std::unique_lock lock(mutex_);
    start_threads(1);
    refuse_missing(lock);
  }

  void run(int num_threads, int64_t num_tasks, const std::function<void(int64_t)>& task) {
    const bool is_caller_in = is_caller_placed(placement_);
    const int num_helpers = num_threads - (is_caller_in ? 1 : 0);
    Job job{task, num_tasks, num_helpers};
    std::unique_lock lock(mutex_);
    start_threads(num_helpers);
    refuse_missing(lock);
    if (num_threads_ > 0 && num_helpers > 0) {
      jobs_.push_back(&job);
      has_job_.notify_all();
    }
    if (is_caller_in || num_threads_ == 0) {
      lock.unlock();
      job.work();
      lock.lock();
    }
    helper_left_.wait(lock, [&job] {
      return job.num_helpers_active == 0 && job.next_task >= job.num_tasks;
    });
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
  }

 private:
  void start_threads(int num_wanted) {
    // Block all signals in these threads, because Python handles signals in its own threads.
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    try {
      for (; num_threads_ < num_wanted; ++num_threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // No more threads can be started: the existing threads, or the caller, do the rest of the
      // work.
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }

  // Waits until the first thread has found out which CPUs it gets.
  void refuse_missing(std::unique_lock<std::mutex>& lock) {
    if (placement_.cpus.empty()) return;
    placed_.wait(lock, [this] { return is_placed_ || num_threads_ == 0; });
    if (missing_cpus_.empty()) return;
    std::string missing;
    for (const int cpu : missing_cpus_) {
      missing += (missing.empty() ? "" : ", ") + std::to_string(cpu);
    }
    throw PlacementError("cpus: expected CPUs that the kernel gives to this process, found " +
                         missing + ", which it does not. Leave them out, or widen the process's "
                         "cpuset.");
  }

  void serve() {
    pthread_setname_np(pthread_self(), "kvext-copy");
    std::vector<int> missing;
    if (!placement_.cpus.empty()) missing = bind_to(placement_.cpus);
    // On Linux this changes the priority of this thread only. If the kernel refuses it, the copies
    // run at the usual priority.
    if (placement_.niceness != 0) {
      setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), placement_.niceness);
    }
    std::unique_lock lock(mutex_);
    // Only the first thread decides, because a later thread must not refuse CPUs that have been
    // accepted.
    if (!is_placed_) missing_cpus_ = missing;
    is_placed_ = true;
    placed_.notify_all();
    const cpu_set_t cpus = set_of(placement_.cpus);
    for (;;) {
      has_job_.wait(lock, [this] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      if (--job.num_helpers_missing == 0) jobs_.pop_front();
      ++job.num_helpers_active;
      lock.unlock();
      // Another library may have bound all threads of the process elsewhere since the last job.
      // vLLM-Ascend does so on ARM hosts, after the KV caches are registered.
      if (!placement_.cpus.empty()) stay_on(cpus);
      job.work();
      lock.lock();
      if (--job.num_helpers_active == 0) helper_left_.notify_all();
    }
  }

  const Placement placement_;
  std::mutex mutex_;
  std::condition_variable placed_;
  std::condition_variable has_job_;
  std::condition_variable helper_left_;
  std::deque<Job*> jobs_;
  std::vector<int> missing_cpus_;
  bool is_placed_ = false;
  int num_threads_ = 0;
};

struct Teams {
  std::mutex mutex;
  std::vector<std::unique_ptr<Team>> teams;
};

// The teams are never destroyed, because threads may sleep in them when the process ends. The
// pointer is null until the first use, and again in a forked child. A child has none of the
// threads, and a thread may have held a mutex at the time of the fork.
std::atomic<Teams*> current_teams{nullptr};

// The handler is set when the library is loaded. If it were set on first use, a forked child might
// wait for the guard of the static variable.
[[maybe_unused]] const int is_prepared =
    pthread_atfork(nullptr, nullptr, [] { current_teams.store(nullptr); });

Teams& teams() {
  Teams* found = current_teams.load();
  if (found == nullptr) {
    auto made = std::make_unique<Teams>();
    if (current_teams.compare_exchange_strong(found, made.get())) found = made.release();
  }
  return *found;
}

Team& team_of(const Placement& placement) {
  Teams& all = teams();
  const std::lock_guard lock(all.mutex);
  for (const auto& team : all.teams) {
    if (team->placement() == placement) return *team;
  }
  return *all.teams.emplace_back(std::make_unique<Team>(placement));
}

}  // namespace

void require_cpus(const Placement& placement) {
  if (!placement.cpus.empty()) team_of(placement).require_cpus();
}

void run_tasks(const Placement& placement, int num_threads, int64_t num_tasks,
               const std::function<void(int64_t)>& task) {
  const auto num_useful = static_cast<int>(std::min<int64_t>(num_threads, num_tasks));
  if (num_useful <= 1 && is_caller_placed(placement)) {
    for (int64_t index = 0; index < num_tasks; ++index) task(index);
  } else if (num_useful >= 1) {
    team_of(placement).run(num_useful, num_tasks, task);
  }
}

}  // namespace kvext
