#include "codec/team.h"
#include "platform/platform.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <omp.h>
#include <optional>
#include <thread>
#include <vector>

namespace macko {

namespace {

constexpr int MAX_TEAM = 1024;

// Whether a thread is inside a loop. If memory for it runs out, a loop inside a loop starts threads of its own.
const platform::thread_flag & in_team() {
    static const platform::thread_flag flag;
    return flag;
}

// Marks this thread as inside a loop.
struct team_member {
    team_member() { in_team().set(true); }
    ~team_member() { in_team().set(false); }
    team_member(const team_member &)             = delete;
    team_member & operator=(const team_member &) = delete;
};

// Threads besides the caller's: as many of n as the system provides. They call work(1), work(2) ...
class helpers {
public:
    template <typename F> helpers(int n, F & work) noexcept {
        try {
            threads_.reserve(static_cast<size_t>(std::max(n, 0)));
            for (int i = 1; i <= n; i++) {
                threads_.emplace_back([&work, i] { work(i); });
            }
        } catch (...) { // std::system_error or std::bad_alloc: continue with the threads that were started
        }
    }
    ~helpers() {
        for (std::thread & t : threads_) {
            t.join();
        }
    }
    helpers(const helpers &)             = delete;
    helpers & operator=(const helpers &) = delete;
    int       size() const { return static_cast<int>(threads_.size()); }

private:
    std::vector<std::thread> threads_;
};

int team_size(int n_threads) { return in_team().get() ? 1 : std::clamp(n_threads, 1, MAX_TEAM); }

} // namespace

int default_threads() { return std::clamp(omp_get_max_threads(), 1, MAX_TEAM); }

int threads_for(int n_threads, int64_t elements) {
    return n_threads > 0 ? std::min(n_threads, MAX_TEAM)
                         : static_cast<int>(std::min<int64_t>(default_threads(), 1 + elements / 65536));
}

void parallel_parts(int n_threads, int64_t n, int64_t part,
                    const std::function<void(int64_t begin, int64_t end, int thread)> & f) {
    const int64_t        n_parts = (n + part - 1) / part;
    std::atomic<int64_t> next{ 0 };
    std::mutex           error_mutex;
    std::exception_ptr   error;
    const auto           work = [&](int thread) noexcept {
        const team_member here;
        try {
            for (int64_t p; (p = next++) < n_parts;) {
                f(p * part, std::min(n, (p + 1) * part), thread);
            }
        } catch (...) {
            next = n_parts;
            const std::lock_guard<std::mutex> lock(error_mutex);
            error = error ? error : std::current_exception();
        }
    };
    const int team = static_cast<int>(std::min<int64_t>(team_size(n_threads), n_parts));
    if (team <= 1) { // no thread and no mark: this may be a loop inside a loop
        for (int64_t p = 0; p < n_parts; p++) {
            f(p * part, std::min(n, (p + 1) * part), 0);
        }
        return;
    }
    {
        const helpers others(team - 1, work);
        work(0);
    }
    if (error) {
        std::rethrow_exception(error);
    }
}

void parallel_ranges(int n_threads, int64_t n, const std::function<void(int64_t begin, int64_t end)> & f) {
    const int64_t team = team_size(n_threads);
    parallel_parts(n_threads, n, std::max<int64_t>(1, (n + team - 1) / team),
                   [&](int64_t begin, int64_t end, int) { f(begin, end); });
}

void team_barrier::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int                    round = round_;
    if (++here_ == n_) {
        here_ = 0;
        round_++;
        all_here_.notify_all();
    } else {
        all_here_.wait(lock, [&] { return round_ != round; });
    }
}

void run_team(int n_threads, const std::function<void(int ith, int nth, team_barrier & barrier)> & f) {
    std::mutex                  mutex;
    std::condition_variable     known;
    std::optional<team_barrier> barrier; // made when the number of threads is known
    int                         nth  = 0;
    const auto                  work = [&](int ith) noexcept {
        {
            std::unique_lock<std::mutex> lock(mutex);
            known.wait(lock, [&] { return nth > 0; });
        }
        const team_member here;
        f(ith, nth, *barrier);
    };
    const helpers others(team_size(n_threads) - 1, work);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        nth = others.size() + 1;
        barrier.emplace(nth);
        known.notify_all();
    }
    work(0);
}

} // namespace macko
