#include "platform/replace.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

static void on_broken_pipe(int number) {
    struct pollfd output[] = { { .fd = STDOUT_FILENO }, { .fd = STDERR_FILENO } };
    if (poll(output, 2, 0) > 0 && ((output[0].revents | output[1].revents) & (POLLERR | POLLHUP))) {
        signal(number, SIG_DFL);
        raise(number);
    }
}

void end_at_broken_output(void) {
    struct sigaction action;
    if (sigaction(SIGPIPE, NULL, &action) == 0 && action.sa_handler == SIG_DFL) {
        action.sa_handler = on_broken_pipe;
        sigaction(SIGPIPE, &action, NULL);
    }
}
