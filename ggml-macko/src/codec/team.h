// Loops over several threads, for all work except the products of a running model. Each call starts its threads and
// ends them before it returns, so a process may fork afterwards; a load keeps them between its loops (kept_threads).
// OpenMP keeps its threads: a forked child waits for threads that it does not have. OpenMP also ends the process if the
// system refuses a thread; this code continues with the threads that it has.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace macko {

// As many threads as OpenMP would use: OMP_NUM_THREADS, or the cores that this process may run on.
int default_threads();

// n_threads, or default_threads() if n_threads is not positive, limited by the amount of work: starting a thread costs
// as much as about 64 Ki elements.
int threads_for(int n_threads, int64_t elements);

// Calls f(begin, end, thread) for parts of 0...n-1 with `part` indices each (the last may be shorter), in any order, on
// up to n_threads threads including the caller's; 0 <= thread < n_threads. The first exception of f is rethrown to the
// caller after all threads have ended; some parts may be missing then. Inside another loop, all parts run on the
// caller's thread.
void parallel_parts(int n_threads, int64_t n, int64_t part,
                    const std::function<void(int64_t begin, int64_t end, int thread)> & f);

// Like parallel_parts(), with about as many parts as threads.
void parallel_ranges(int n_threads, int64_t n, const std::function<void(int64_t begin, int64_t end)> & f);

// While an object of this class lives, the loops of the thread that made it keep their threads, which sleep between
// loops. Objects may nest; the outermost one has the threads, and its destructor ends them. In a forked process, loops
// start threads of their own.
class kept_threads {
public:
    kept_threads();
    ~kept_threads(); // on the same thread
    kept_threads(const kept_threads &)             = delete;
    kept_threads & operator=(const kept_threads &) = delete;

private:
    friend class team_threads;
    std::unique_ptr<class helpers> helpers_; // nullptr inside another object
    const int64_t                  process_;
};

// A thread beside the caller's, for tasks with loops of their own, which keep their threads.
class side_thread {
public:
    side_thread() = default;
    ~side_thread(); // waits
    side_thread(const side_thread &)             = delete;
    side_thread & operator=(const side_thread &) = delete;

    // Runs a task, which must not throw, on the thread. false: the thread is busy, or the system refuses one.
    [[nodiscard]] bool start(std::function<void()> task);
    // Returns when no task is running.
    void wait();

private:
    void serve() noexcept;

    std::mutex              mutex_; // guards all members but thread_
    std::condition_variable changed_;
    std::function<void()>   task_; // running, or null
    bool                    end_ = false;
    std::thread             thread_;
};

// A barrier at which all threads of a team wait for each other.
class team_barrier {
public:
    explicit team_barrier(int n) : n_(n) {}
    void wait();

private:
    std::mutex              mutex_;
    std::condition_variable all_here_;
    const int               n_;
    int                     here_ = 0, round_ = 0;
};

// Calls f(ith, nth, barrier) once on each of nth threads at the same time, nth <= n_threads. f must not throw.
void run_team(int n_threads, const std::function<void(int ith, int nth, team_barrier & barrier)> & f);

} // namespace macko
