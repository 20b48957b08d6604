// A call is a Job on the stack of the thread that makes it.  The caller gives the job to idle
// threads of the pool, works on it too, takes it back from threads that have not begun, and waits
// for the others: nobody waits for a thread to wake.
#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>

#include "cpu/places.h"
#include "cpu/waiting.h"

namespace attnfold::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread looks for what it waits for before it sleeps: inside a call, and for its next
// call.  To wake a sleeper costs its waker a few microseconds, and the sleeper 20 to 60.  It does
// not look at all where threads are more than CPUs: one that does work may wait for its place. (Nor
// does it yield: it would get its CPU back when another process has had it for milliseconds.)
using Time = std::chrono::microseconds;
constexpr Time kSpinInCall{500}, kSpinBetweenCalls{20};

// After the system has refused a thread, how long not to ask again.
constexpr std::chrono::seconds kRefusal{1};

// What the word of a thread says.
enum : uint32_t {
  kIdle,
  kAsleep,  // on its word
  kGiven,   // has a job that it has not begun
  kWorking,
  kAwaited,  // working, and its caller sleeps on the word
  kDone,     // found no more to do in a call that goes on
  kEnding,
};

struct Job;

struct alignas(64) Worker {
  Word word;
  Job* job;
  Worker* next;         // in the list of idle threads, or in that of a job
  Worker* next_asleep;  // of those that a job has to wake
  pthread_t thread;
  std::atomic<int> cpu;  // where it was last, or is to wake; -1: anywhere
};

struct Job {
  std::span<const Phase> phases;
  void (*call)(const Phase& phase, int32_t i);
  bool spins;
  Places places;

  // Under the pool's lock:
  Worker* team = nullptr;
  int32_t missing = 0;  // threads
  Job* next = nullptr;  // of those that miss some

  std::atomic<Worker*> asleep{nullptr};           // given this job, not yet woken
  alignas(64) std::atomic<int64_t> next_body{0};  // counted through all phases, as is `num_done`
  alignas(64) Word num_done{0};
  Word num_sleeping{0};  // until a phase is done

  Time spin_time() const { return spins ? kSpinInCall : Time{0}; }
  void wake_team();
  void work();
  void wait_until_done(uint32_t bodies);
};

cpu_set_t only(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return set;
}

/** Threads that were woken help: to wake 15 alone takes longer than they need for each other. */
void Job::wake_team() {
  Worker* worker = asleep.load(std::memory_order_acquire);
  while (worker != nullptr) {
    if (!asleep.compare_exchange_weak(worker, worker->next_asleep, std::memory_order_acquire))
      continue;
    if (const int cpu = worker->cpu; places.known() && cpu >= 0) {
      const cpu_set_t there = only(cpu);
      pthread_setaffinity_np(worker->thread, sizeof(there), &there);
    }
    wake(worker->word);
    worker = asleep.load(std::memory_order_acquire);
  }
}

/** Takes bodies until none is left. */
void Job::work() {
  auto phase = phases.begin();
  uint32_t begin = 0, end = static_cast<uint32_t>(phase->n);
  for (;;) {
    const int64_t body = next_body.fetch_add(1, std::memory_order_relaxed);
    while (body >= end) {
      if (++phase == phases.end()) return;
      begin = end;
      end += static_cast<uint32_t>(phase->n);
    }
    // All bodies before `begin` were taken, by threads that are at them now.
    if (begin > 0) wait_until_done(begin);
    call(*phase, static_cast<int32_t>(body - begin));
    if (num_done.fetch_add(1) + 1 == end && num_sleeping.load() > 0) wake(num_done);
  }
}

void Job::wait_until_done(uint32_t bodies) {
  if (spin_until([&] { return num_done.load(std::memory_order_acquire) >= bodies; }, spin_time()))
    return;
  num_sleeping.fetch_add(1);
  for (uint32_t now = num_done.load(); now < bodies; now = num_done.load())
    sleep_while(num_done, now);
  num_sleeping.fetch_sub(1);
}

void* worker_main(void* argument) {
  Worker& self = *static_cast<Worker*>(argument);
  const auto is_not = [&self](uint32_t word) {
    return [&self, word] { return self.word.load(std::memory_order_relaxed) != word; };
  };
  bool spins = true, has_slept = true;
  for (;;) {
    if (spins) spin_until(is_not(kDone), kSpinInCall);
    if (spins) spin_until(is_not(kIdle), kSpinBetweenCalls);
    uint32_t word = self.word.load();
    if (word == kDone || word == kIdle) self.word.compare_exchange_strong(word, kAsleep);
    while ((word = self.word.load()) == kAsleep) {
      has_slept = true;
      sleep_while(self.word, kAsleep);
    }
    if (word == kEnding) return nullptr;
    if (word != kGiven || !self.word.compare_exchange_strong(word, kWorking)) continue;
    self.job->wake_team();
    if (has_slept && self.job->places.known()) {
      const cpu_set_t& allowed = self.job->places.allowed();
      sched_setaffinity(0, sizeof(allowed), &allowed);
    }
    has_slept = false;
    spins = self.job->spins;
    self.job->work();
    self.cpu = sched_getcpu();
    if (self.word.exchange(kDone) == kAwaited) wake(self.word);  // the job may be gone
  }
}

// What a forked child begins anew, as no thread but its own is there.  Without destructors, so that
// calls which other destructors make find it.
struct Shared {
  std::mutex mutex;
  Worker* idle = nullptr;  // the last to become idle first: its caches are the warmest
  Job* short_of_threads = nullptr;
  int32_t num_workers = 0;
  bool ended = false;
  Clock::time_point ask_again{};  // for a thread
};
constinit Shared g_shared;
constinit Worker g_workers[kMostThreads - 1];
bool g_follows_forks = false;  // a child inherits this

void begin_anew_in_child() { new (&g_shared) Shared; }

/** A thread that begins with `job`; null if the pool has as many as it may have, or gets none. */
Worker* start_worker(Job* job, int32_t num_threads) {
  Shared& s = g_shared;
  if (s.ended || s.num_workers + 1 >= std::min(std::max(num_threads, usable_cpus()), kMostThreads))
    return nullptr;
  if (Clock::now() < s.ask_again) return nullptr;
  if (!g_follows_forks)
    g_follows_forks = pthread_atfork(nullptr, nullptr, begin_anew_in_child) == 0;
  Worker* worker = &g_workers[s.num_workers];
  worker->word = kGiven;
  worker->job = job;
  worker->cpu = job->places.take_any();
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return nullptr;
  if (worker->cpu >= 0) {
    const cpu_set_t there = only(worker->cpu);
    pthread_attr_setaffinity_np(&attributes, sizeof(there), &there);
  }
  // The host's signals are for the host's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const bool started =
      g_follows_forks && pthread_create(&worker->thread, &attributes, worker_main, worker) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (!started) {
    s.ask_again = Clock::now() + kRefusal;
    return nullptr;
  }
#if defined(__linux__)
  pthread_setname_np(worker->thread, "attnfold");
#endif
  ++s.num_workers;
  return worker;
}

/** Whether the worker sleeps and has to be woken. */
bool give(Worker* worker, Job* job) {
  worker->next = job->team;
  job->team = worker;
  worker->job = job;
  return worker->word.exchange(kGiven) == kAsleep;
}

/** Gives the job to `num_workers` threads, or to those that there are. */
void find_team(Job* job, int32_t num_workers, int32_t num_threads) {
  Shared& s = g_shared;
  const std::lock_guard lock(s.mutex);
  // Those that are awake keep their CPUs, so they come first.
  Worker* awake = nullptr;
  Worker* asleep = nullptr;
  int32_t missing = num_workers;
  for (; missing > 0 && s.idle != nullptr; --missing) {
    Worker* worker = s.idle;
    s.idle = worker->next;
    Worker** list = worker->word.load(std::memory_order_relaxed) == kAsleep ? &asleep : &awake;
    worker->next = *list;
    *list = worker;
  }
  if (asleep != nullptr || missing > 0) job->places.begin(num_workers + 1);
  for (Worker* worker = awake; worker != nullptr; worker = worker->next)
    job->places.take(worker->cpu);
  for (Worker* worker = asleep; worker != nullptr; worker = worker->next)
    if (!job->places.take(worker->cpu)) worker->cpu = job->places.take_any();
  Worker* to_wake = nullptr;
  for (Worker* list : {asleep, awake}) {
    while (Worker* worker = list) {
      list = worker->next;
      if (!give(worker, job)) continue;
      worker->next_asleep = to_wake;
      to_wake = worker;
    }
  }
  job->asleep.store(to_wake, std::memory_order_release);
  for (; missing > 0; --missing) {
    Worker* worker = start_worker(job, num_threads);
    if (worker == nullptr) break;
    worker->next = job->team;
    job->team = worker;
  }
  job->missing = missing;
  if (missing == 0) return;
  job->next = s.short_of_threads;
  s.short_of_threads = job;
}

/** Returns when the thread does not have its job any more. */
void take_back(Worker* worker, Time spin_time) {
  uint32_t word = kGiven;
  if (worker->word.compare_exchange_strong(word, kIdle)) return;
  const auto has_left = [worker] {
    const uint32_t word = worker->word.load(std::memory_order_acquire);
    return word != kWorking && word != kAwaited;
  };
  if (!spin_until(has_left, spin_time)) {
    word = kWorking;
    worker->word.compare_exchange_strong(word, kAwaited);
    while (!has_left()) sleep_while(worker->word, kAwaited);
  }
  word = kDone;
  worker->word.compare_exchange_strong(word, kIdle);
}

void dismiss_team(Job* job) {
  Shared& s = g_shared;
  {
    const std::lock_guard lock(s.mutex);
    for (Job** at = &s.short_of_threads; *at != nullptr; at = &(*at)->next) {
      if (*at != job) continue;
      *at = job->next;
      break;
    }
  }
  for (Worker* worker = job->team; worker != nullptr; worker = worker->next)
    take_back(worker, job->spin_time());
  const std::lock_guard lock(s.mutex);
  while (Worker* worker = job->team) {
    job->team = worker->next;
    if (Job* other = s.short_of_threads) {
      if (give(worker, other)) wake(worker->word);
      if (--other->missing == 0) s.short_of_threads = other->next;
    } else {
      worker->next = s.idle;
      s.idle = worker;
    }
  }
}

// When the process ends, or the object that holds the library is closed: no thread may be left in
// code that goes away.  Threads at a call are another matter: the process ends without waiting for
// calls, and to close a library inside of one is a fault of the host.
struct AtEnd {
  ~AtEnd() {
    Worker* worker;
    {
      const std::lock_guard lock(g_shared.mutex);
      g_shared.ended = true;
      worker = g_shared.idle;
      g_shared.idle = nullptr;
    }
    for (; worker != nullptr; worker = worker->next) {
      worker->word = kEnding;
      wake(worker->word);
      pthread_join(worker->thread, nullptr);
    }
  }
} g_at_end;

}  // namespace

int32_t usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0)
    return CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int32_t>(n) : 1;
}

void run_on_pool(int32_t num_threads, std::span<const Phase> phases,
                 void (*call)(const Phase& phase, int32_t i)) {
  int32_t most = 0;
  for (const Phase& phase : phases) most = std::max(most, phase.n);
  const int32_t num_workers = std::min(num_threads, most) - 1;
  if (num_workers <= 0) {
    for (const Phase& phase : phases)
      for (int32_t i = 0; i < phase.n; ++i) call(phase, i);
    return;
  }
  static const int32_t num_cpus = usable_cpus();
  Job job{phases, call, num_workers < num_cpus, {}};
  find_team(&job, num_workers, num_threads);
  job.wake_team();
  job.work();
  dismiss_team(&job);
}

}  // namespace attnfold::cpu
