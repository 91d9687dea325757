#include "codec/team.h"
#include "platform/platform.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <omp.h>
#include <optional>
#include <vector>

namespace macko {

namespace {

constexpr int MAX_TEAM = 1024;

// What a thread is doing: nullptr, its kept_threads, or IN_TEAM inside a loop. If memory for the pointer runs out, a
// loop inside a loop starts threads of its own.
const platform::thread_pointer & state() {
    static const platform::thread_pointer pointer;
    return pointer;
}
char IN_TEAM; // only its address counts

// Marks this thread as inside a loop.
struct team_member {
    void * const outer = state().get();
    team_member() { state().set(&IN_TEAM); }
    ~team_member() { state().set(outer); }
    team_member(const team_member &)             = delete;
    team_member & operator=(const team_member &) = delete;
};

int team_size(int n_threads) { return state().get() == &IN_TEAM ? 1 : std::clamp(n_threads, 1, MAX_TEAM); }

} // namespace

// Threads besides the caller's. They sleep while there is no work. once: run() is called once, and they end with it.
class helpers {
public:
    explicit helpers(bool once) : once_(once) {}
    ~helpers() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            end_ = true;
        }
        work_exists_.notify_all();
        for (std::thread & t : threads_) {
            t.join();
        }
    }
    helpers(const helpers &)             = delete;
    helpers & operator=(const helpers &) = delete;

    // Starts threads until there are n, and returns how many of n the system provides.
    int start(int n) noexcept {
        try {
            while (size() < n) {
                threads_.emplace_back([this] { serve(); });
            }
        } catch (...) { // std::system_error or std::bad_alloc: continue with the threads that were started
        }
        return std::min(n, size());
    }
    // Calls work(0) on this thread and work(1) ... work(n) on others. This thread also makes the calls that no thread
    // has begun when work(0) returns.
    void run(int n, const std::function<void(int)> & work) noexcept {
        std::unique_lock<std::mutex> lock(mutex_);
        work_        = &work;
        next_        = 1;
        end_of_work_ = n + 1;
        end_         = once_;
        lock.unlock();
        work_exists_.notify_all();
        start(n);
        work(0);
        lock.lock();
        while (call_next(lock)) {
        }
        all_done_.wait(lock, [&] { return n_running_ == 0; });
    }

private:
    int size() const { return static_cast<int>(threads_.size()); }

    bool call_next(std::unique_lock<std::mutex> & lock) noexcept {
        if (next_ == end_of_work_) {
            return false;
        }
        const int i = next_++;
        n_running_++;
        lock.unlock();
        (*work_)(i);
        lock.lock();
        if (--n_running_ == 0) {
            all_done_.notify_one();
        }
        return true;
    }
    void serve() noexcept {
        std::unique_lock<std::mutex> lock(mutex_);
        while (call_next(lock) || !end_) {
            work_exists_.wait(lock, [&] { return end_ || next_ < end_of_work_; });
        }
    }

    std::mutex                       mutex_; // guards all members but threads_
    std::condition_variable          work_exists_, all_done_;
    const std::function<void(int)> * work_ = nullptr;
    int                              next_ = 0, end_of_work_ = 0, n_running_ = 0;
    const bool                       once_;
    bool                             end_ = false;
    std::vector<std::thread>         threads_;
};

// The kept threads of this thread, or threads for one loop.
class team_threads {
public:
    team_threads() {
        void * const at   = state().get();
        const auto * kept = at == &IN_TEAM ? nullptr : static_cast<kept_threads *>(at);
        helpers_ = kept && kept->process_ == platform::process_id() ? kept->helpers_.get() : &own_.emplace(true);
    }
    helpers * operator->() { return helpers_; }

private:
    std::optional<helpers> own_;
    helpers *              helpers_;
};

kept_threads::kept_threads() : process_(platform::process_id()) {
    if (!state().get()) {
        helpers_ = std::make_unique<helpers>(false);
        state().set(this);
    }
}

kept_threads::~kept_threads() {
    if (helpers_) {
        state().set(nullptr);
    }
    if (process_ != platform::process_id()) {
        (void)helpers_.release(); // its threads are those of another process
    }
}

side_thread::~side_thread() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        end_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
}

bool side_thread::start(std::function<void()> task) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (task_) {
            return false;
        }
        task_ = std::move(task);
    }
    changed_.notify_all();
    try {
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { serve(); });
        }
    } catch (...) { // std::system_error or std::bad_alloc
        task_ = nullptr;
        return false;
    }
    return true;
}

void side_thread::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !task_; });
}

void side_thread::serve() noexcept {
    std::optional<kept_threads> threads;
    try {
        threads.emplace();
    } catch (const std::bad_alloc &) { // loops start threads of their own
    }
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return task_ || end_; });
        if (!task_) {
            return;
        }
        lock.unlock();
        task_();
        lock.lock();
        task_ = nullptr;
        changed_.notify_all();
    }
}

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
    team_threads()->run(team - 1, std::cref(work));
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
    team_threads others;
    const int    nth = 1 + others->start(team_size(n_threads) - 1);
    team_barrier barrier(nth);
    const auto   work = [&](int ith) noexcept {
        const team_member here;
        f(ith, nth, barrier);
    };
    others->run(nth - 1, std::cref(work));
}

} // namespace macko
