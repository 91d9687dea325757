// Loops over several threads, for everything but the products of a running model. The threads are started for one call
// and have ended when it returns: a process may fork afterwards. OpenMP keeps its threads, which a child does not have
// and waits for; and it ends the process where the system refuses a thread. Here the threads that there are do the
// work.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace macko {

// as many as OpenMP would use: OMP_NUM_THREADS, or the cores that this process may run on
int default_threads();

// n_threads, or default_threads() if it is not positive, but no more than there is work for: starting a thread costs as
// much as some 64 Ki elements
int threads_for(int n_threads, int64_t elements);

// Calls f(begin, end, thread) for parts of 0...n-1 of `part` indices, the last may be shorter, in any order and on up
// to n_threads threads, of which the caller's is one; 0 <= thread < n_threads. What f throws first is thrown to the
// caller when all threads have ended; then parts may be missing. Inside another loop it runs on the caller's thread
// alone.
void parallel_parts(int n_threads, int64_t n, int64_t part,
                    const std::function<void(int64_t begin, int64_t end, int thread)> & f);

// the same with about as many parts as threads
void parallel_ranges(int n_threads, int64_t n, const std::function<void(int64_t begin, int64_t end)> & f);

// A place where all threads of a team wait for each other.
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
