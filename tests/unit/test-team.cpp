// Loops over threads: every index once, exceptions, loops inside loops, barriers.
#include "codec/team.h"
#include "test.h"

#include <atomic>
#include <chrono>
#include <future>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace macko;

TEST(every_index_is_visited_once) {
    for (const int n_threads : { 1, 2, 5 }) {
        for (const int64_t n : { 0, 1, 7, 64, 1000 }) {
            for (const int64_t part : { 1, 3, 2000 }) {
                std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
                std::atomic<bool>             in_range{ true };
                parallel_parts(n_threads, n, part, [&](int64_t begin, int64_t end, int thread) {
                    in_range = in_range && begin < end && end - begin <= part && thread >= 0 && thread < n_threads;
                    for (int64_t i = begin; i < end; i++) {
                        seen[static_cast<size_t>(i)]++;
                    }
                });
                CHECK(in_range, "%d threads, %lld items", n_threads, static_cast<long long>(n));
                for (const auto & count : seen) {
                    CHECK(count == 1, "%d visits", count.load());
                }
            }
        }
    }
}

TEST(ranges_cover_everything) {
    std::atomic<int64_t> sum{ 0 };
    parallel_ranges(3, 100, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            sum += i;
        }
    });
    CHECK(sum == 4950, "%lld", static_cast<long long>(sum));
}

TEST(exception_reaches_the_caller) {
    for (const int n_threads : { 1, 4 }) {
        bool caught = false;
        try {
            parallel_parts(n_threads, 1000, 1, [](int64_t begin, int64_t, int) {
                if (begin == 500) {
                    throw std::runtime_error("500");
                }
            });
        } catch (const std::runtime_error & e) {
            caught = std::string(e.what()) == "500";
        }
        CHECK(caught, "%d threads", n_threads);
    }
}

TEST(loop_inside_a_loop_has_one_thread) {
    std::atomic<int> n_inner{ 0 }, beyond_one{ 0 };
    parallel_parts(4, 16, 1, [&](int64_t, int64_t, int) {
        parallel_parts(4, 16, 1, [&](int64_t, int64_t, int thread) {
            n_inner++;
            beyond_one += thread > 0;
        });
    });
    CHECK(n_inner == 256 && beyond_one == 0, "%d calls, %d of other threads", n_inner.load(), beyond_one.load());
}

TEST(kept_threads_run_many_loops) {
    const kept_threads        outer, inner;
    std::mutex                mutex;
    std::set<std::thread::id> seen;
    for (int round = 0; round < 100; round++) {
        run_team(round % 5, [&](int, int, team_barrier & barrier) {
            barrier.wait(); // all threads of the team have begun
            const std::lock_guard<std::mutex> lock(mutex);
            seen.insert(std::this_thread::get_id());
        });
        std::atomic<int64_t> sum{ 0 };
        parallel_parts(4, 10, 1, [&](int64_t begin, int64_t, int) {
            const kept_threads none;
            parallel_ranges(2, 1, [&](int64_t, int64_t) { sum += begin; });
        });
        CHECK(sum == 45, "%lld", static_cast<long long>(sum));
    }
    CHECK(seen.size() == 4, "%zu threads", seen.size());
}

TEST(side_thread_runs_a_task_beside_the_caller) {
    std::atomic<int> n_started{ 0 }, n_beside{ 0 };
    int64_t          sums[100] = {};
    {
        side_thread side;
        side.wait(); // no task
        for (int64_t & sum : sums) {
            const auto caller = std::this_thread::get_id();
            n_started += side.start([&, caller] {
                std::atomic<int64_t> all{ 0 };
                parallel_parts(3, 10, 1, [&](int64_t begin, int64_t, int) { all += begin; });
                sum = all;
                n_beside += std::this_thread::get_id() != caller;
            });
            side.wait();
            CHECK(sum == 45, "%lld", static_cast<long long>(sum));
        }
        sums[0] = 0;
        CHECK(side.start([&] { std::this_thread::sleep_for(std::chrono::milliseconds(20)), sums[0] = 1; }), "idle");
    }
    CHECK(sums[0] == 1 && n_started == 100 && n_beside == 100, "%d, %d", n_started.load(), n_beside.load());
}

TEST(side_thread_refuses_a_task_while_it_is_busy) {
    std::promise<void> go;
    side_thread        side;
    bool               ran = false;
    CHECK(side.start([&] { go.get_future().wait(); }), "idle");
    CHECK(!side.start([&] { ran = true; }), "busy");
    go.set_value();
    side.wait();
    CHECK(!ran && side.start([&] { ran = true; }), "idle again");
    side.wait();
    CHECK(ran, "second task");
}

TEST(barrier_separates_rounds) {
    for (const int n_threads : { 1, 4 }) {
        std::vector<int> values(static_cast<size_t>(n_threads), 0);
        std::atomic<int> bad{ 0 };
        run_team(n_threads, [&](int ith, int nth, team_barrier & barrier) {
            bad += nth != n_threads;
            for (int round = 1; round <= 100; round++) {
                values[static_cast<size_t>(ith)] = round;
                barrier.wait();
                for (const int v : values) {
                    bad += v != round;
                }
                barrier.wait();
            }
        });
        CHECK(bad == 0, "%d", bad.load());
    }
}

int main(int argc, char ** argv) { return test_main("test-team", argc, argv); }
