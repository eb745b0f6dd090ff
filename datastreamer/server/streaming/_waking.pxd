"""How the live thread waits for a commit, and how soon it runs then: calls of the system."""

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #include <poll.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/stat.h>
    #if defined(__linux__)
    #include <sched.h>
    #include <sys/epoll.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    #endif

    /* A descriptor that waits for the next write to the eventfd `fd`, which then need not be read:
       a system call less for each commit. -1 if there is none. */
    static int open_watch(int fd) {
    #if defined(__linux__)
        struct epoll_event event = {EPOLLIN | EPOLLET, {0}};
        struct stat kind;
        int watch;
        /* A pipe that is not read becomes full, and accepts no further write then. */
        if (fstat(fd, &kind) || S_ISFIFO(kind.st_mode) || S_ISSOCK(kind.st_mode)) return -1;
        watch = epoll_create1(EPOLL_CLOEXEC);
        if (watch >= 0 && epoll_ctl(watch, EPOLL_CTL_ADD, fd, &event)) {
            close(watch);
            return -1;
        }
        return watch;
    #else
        return -1;
    #endif
    }

    /* Wait for a write to `fd`, at most this long; whether it has to be read. */
    static int wait_for_write(int fd, int watch, int milliseconds) {
    #if defined(__linux__)
        struct epoll_event event;
        if (watch >= 0) {
            epoll_wait(watch, &event, 1, milliseconds);
            return 0;
        }
    #endif
        struct pollfd it = {fd, POLLIN, 0};
        return poll(&it, 1, milliseconds) > 0;
    }

    /* As long as it sends a commit to 128 clients: it is rarely interrupted between them. */
    #define SOON_NS 500000

    /* Ask that this thread runs soon when it is woken, before the one that woke it if they share a
       CPU, or (`soon` is 0) that it does not. A short slice asks Linux for that from 6.12 on; older
       ones ignore it. `usual` keeps the slice that it had before, in ns. */
    static void ask_to_run_soon(int soon, uint64_t *usual) {
    #if defined(__linux__) && defined(SYS_sched_getattr)
        struct {
            uint32_t size, policy;
            uint64_t flags;
            int32_t nice;
            uint32_t priority;
            uint64_t runtime, deadline, period;
        } has;
        memset(&has, 0, sizeof has);
        if (syscall(SYS_sched_getattr, 0, &has, sizeof has, 0) || has.policy != SCHED_OTHER) return;
        has.size = sizeof has;
        if (soon) *usual = has.runtime;
        has.runtime = soon ? SOON_NS : *usual;
        syscall(SYS_sched_setattr, 0, &has, 0);
    #endif
    }
    """
    int open_watch(int fd) nogil
    bint wait_for_write(int fd, int watch, int milliseconds) nogil
    void ask_to_run_soon(bint soon, uint64_t* usual) nogil
